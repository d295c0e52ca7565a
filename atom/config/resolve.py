"""From what the user asked for to what this host runs: no `auto` and no rule is left open.

What only a worker can measure (KV memory) or only the core can settle (a context that the KV
cache cannot hold) stays None. Nothing is probed here: the preparation step did, and the
result is a function of the arguments alone.
"""

from dataclasses import dataclass, field, replace
from typing import Literal, cast

from atom.config.cache import CacheConfig
from atom.config.checkpoint import Checkpoint
from atom.config.device import DeviceConfig
from atom.config.engine import EngineConfig
from atom.config.fields import ConfigError
from atom.config.model import ModelConfig
from atom.config.scheduler import SchedulerConfig

Device = Literal["cpu", "cuda"]
Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class DeviceCapabilities:
    """What the preparation step found out about the host."""

    cuda: int = 0
    """GPUs that torch can use, NVIDIA or ROCm."""
    rocm: bool = False
    names: list[str] = field(default_factory=list)
    """One for each GPU."""
    gpu_dtypes: list[str] = field(default_factory=list)
    """Compute dtypes that every one of the GPUs has arithmetic for."""
    gpu_problem: str = ""
    """Why torch sees no GPU although the host seems to have one."""
    cpu_dtypes: list[str] = field(default_factory=lambda: ["float32"])
    """Compute dtypes that the CPU has arithmetic for."""
    cpu_cores: int = 1
    """Cores that this process may use."""


@dataclass(frozen=True)
class Resolved:
    """The configuration to run, and a line for the user on each choice that needs one."""

    config: EngineConfig
    notes: list[str]


@dataclass(frozen=True)
class _DeviceDefaults:
    max_num_batched_tokens: int
    max_num_seqs: int


_DEFAULTS: dict[Device, _DeviceDefaults] = {
    "cpu": _DeviceDefaults(max_num_batched_tokens=2048, max_num_seqs=256),
    "cuda": _DeviceDefaults(max_num_batched_tokens=16384, max_num_seqs=512),
}

_GRAPH_FLAGS = ("enforce_eager", "cudagraph_mode", "cudagraph_capture_sizes")
_MOST_CAPTURED = 512

_CPU_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16"}


def resolve(
    config: EngineConfig, checkpoint: Checkpoint, explicit: set[str], capabilities: DeviceCapabilities
) -> Resolved:
    """Decide everything that the user left open; `explicit` names the fields that were given.

    Raises ConfigError for a choice that this checkpoint or this host cannot serve.
    """
    notes: list[str] = []
    device = _device(config, capabilities, notes)
    dtype = _dtype(config.model.dtype, device, checkpoint, capabilities, notes)
    if config.device.batch_invariant and device == "cpu":
        raise ConfigError("--batch-invariant needs a GPU: on a CPU sums are cut to suit each batch")
    if config.device.batch_invariant and checkpoint.keeps_states:
        raise ConfigError(
            f"--batch-invariant: {checkpoint.model_type} computes its recurrent states in the pieces that "
            "each step brings, and their bits depend on these; leave it out"
        )
    _check_length(config.model, checkpoint)
    _check_ranks(config.parallel.tensor_parallel_size, checkpoint)
    cache = _cache(config.cache, checkpoint, explicit, notes)
    notes += _without_effect(config, explicit, device)
    if checkpoint.ignored_defaults:
        names = ", ".join(checkpoint.ignored_defaults)
        notes.append(f"generation_config.json also sets {names}: not supported, not applied")
    notes += checkpoint.added_settings
    scheduler = _scheduler(config.scheduler, _DEFAULTS[device])
    resolved = replace(
        config,
        model=_model(config.model, dtype),
        cache=cache,
        scheduler=scheduler,
        device=_threads(_graphs(replace(config.device, device=device), scheduler), config, capabilities),
    )
    return Resolved(resolved, notes)


def _device(config: EngineConfig, capabilities: DeviceCapabilities, notes: list[str]) -> Device:
    wanted, ranks = config.device.device, config.parallel.tensor_parallel_size
    if wanted == "cpu":
        return "cpu"
    if capabilities.cuda == 0:
        if wanted == "cuda":
            problem = capabilities.gpu_problem or "this host has none"
            raise ConfigError(f"--device cuda needs a GPU: {problem}; use --device cpu")
        if capabilities.gpu_problem:
            notes.append(f"computing on the CPU: {capabilities.gpu_problem}")
        return "cpu"
    if ranks > capabilities.cuda:
        raise ConfigError(
            f"--tensor-parallel-size {ranks} needs {ranks} GPUs and torch sees {capabilities.cuda}; "
            f"use at most {capabilities.cuda}"
        )
    return "cuda"


def _dtype(
    wanted: str, device: Device, checkpoint: Checkpoint, capabilities: DeviceCapabilities, notes: list[str]
) -> Dtype:
    native = capabilities.gpu_dtypes if device == "cuda" else capabilities.cpu_dtypes
    place = "this GPU" if device == "cuda" else "this CPU"
    dtype = checkpoint.dtype if wanted == "auto" else wanted
    arithmetic = _CPU_DTYPE_NAMES.get(dtype, dtype)
    if dtype in native:
        return cast(Dtype, dtype)
    if wanted != "auto":
        notes.append(f"--dtype {wanted}: {place} has no {arithmetic} arithmetic, expect it to be slow")
        return cast(Dtype, dtype)
    # On a GPU the other 16 bit type keeps half the memory; a CPU without one computes in float32.
    chosen: Dtype = "float16" if device == "cuda" and "float16" in native else "float32"
    notes.append(f"{place} has no {arithmetic} arithmetic: computing in {chosen} (--dtype {dtype} insists)")
    return chosen


def _check_length(model: ModelConfig, checkpoint: Checkpoint) -> None:
    limit = checkpoint.max_model_len
    if model.max_model_len is not None and model.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len {model.max_model_len}: the checkpoint was made for {limit} positions; "
            f"use at most {limit}"
        )


def _check_ranks(ranks: int, checkpoint: Checkpoint) -> None:
    heads = checkpoint.hf_config.get("num_attention_heads", ranks)
    if ranks > heads:
        raise ConfigError(
            f"--tensor-parallel-size {ranks}: the model has {heads} attention heads to share out; "
            f"use at most {heads}"
        )


def _cache(cache: CacheConfig, checkpoint: Checkpoint, explicit: set[str], notes: list[str]) -> CacheConfig:
    """Without prefix caching where a request's past is a state: equal beginnings can share no part of it."""
    if not checkpoint.keeps_states or not cache.enable_prefix_caching:
        return cache
    reason = f"{checkpoint.model_type} keeps a recurrent state of each request, which no other can share"
    if "enable_prefix_caching" in explicit:
        raise ConfigError(f"--enable-prefix-caching: {reason}; leave it out")
    notes.append(f"prefix caching is off: {reason}")
    return replace(cache, enable_prefix_caching=False)


def _model(model: ModelConfig, dtype: Dtype) -> ModelConfig:
    return replace(model, dtype=dtype, served_model_name=model.served_model_name or model.model)


def _scheduler(scheduler: SchedulerConfig, defaults: _DeviceDefaults) -> SchedulerConfig:
    return replace(
        scheduler,
        max_num_batched_tokens=scheduler.max_num_batched_tokens or defaults.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs or defaults.max_num_seqs,
    )


def _graphs(device: DeviceConfig, scheduler: SchedulerConfig) -> DeviceConfig:
    """The sizes to capture; none on a CPU, nor where the user wants none."""
    if device.device == "cpu" or device.enforce_eager or device.cudagraph_mode == "NONE":
        return replace(device, cudagraph_capture_sizes="[]")
    if device.cudagraph_capture_sizes is not None:
        return device
    assert scheduler.max_num_seqs is not None
    most = min(scheduler.max_num_seqs, _MOST_CAPTURED)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, _MOST_CAPTURED, 16), most}
    return replace(device, cudagraph_capture_sizes=str(sorted(size for size in sizes if size <= most)))


def _threads(device: DeviceConfig, config: EngineConfig, capabilities: DeviceCapabilities) -> DeviceConfig:
    if device.device == "cuda" or device.cpu_threads is not None:
        return device
    share = capabilities.cpu_cores // config.parallel.tensor_parallel_size
    return replace(device, cpu_threads=max(1, share))


def _without_effect(config: EngineConfig, explicit: set[str], device: Device) -> list[str]:
    """A line for each choice of the user that changes nothing here."""
    cache = config.cache
    memory_rule = "kv_cache_memory_bytes" if cache.num_kv_blocks is None else "num_kv_blocks"
    memory_given = cache.num_kv_blocks is not None or cache.kv_cache_memory_bytes is not None
    reasons = {
        "port": "all processes are on this host and talk over local sockets; HTTP is --server-port",
    }
    if device == "cpu":
        reasons["gpu_memory_utilization"] = "a CPU's KV cache is set by --kv-cache-memory-bytes"
        reasons |= dict.fromkeys(_GRAPH_FLAGS, "graphs are for GPUs")
    else:
        reasons["cpu_threads"] = "the workers compute on GPUs"
        if memory_given:
            reasons["gpu_memory_utilization"] = f"--{memory_rule.replace('_', '-')} sets the KV cache"
    if config.observability.torch_profiler_dir is None:
        reasons["mark_trace"] = "traces are written only with --torch-profiler-dir"
    if config.model.trust_remote_code:
        reasons["trust_remote_code"] = "code from a checkpoint is never run"
    if cache.num_kv_blocks is not None:
        reasons["kv_cache_memory_bytes"] = "--num-kv-blocks overrides it"
    return [
        f"--{name.replace('_', '-')} has no effect: {reason}"
        for name, reason in reasons.items()
        if name in explicit
    ]
