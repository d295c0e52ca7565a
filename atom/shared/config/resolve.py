"""Resolves `auto` and unset fields for a checkpoint and a host.

The size of the KV cache, which a worker measures, and a context length that depends on it stay
None. Nothing is probed here: the preparation step did that, and the result depends on the
arguments alone.
"""

from dataclasses import dataclass, field, replace
from typing import Literal, cast

from atom.shared.config.cache import CacheConfig
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import COMPILERS, DeviceConfig
from atom.shared.config.engine import EngineConfig
from atom.shared.config.fields import ConfigError
from atom.shared.config.images import image_limit
from atom.shared.config.kv_events import kv_events_config
from atom.shared.config.kv_peers import PromptTransfer, prompt_transfer
from atom.shared.config.kv_quantization import FP8, kv_format
from atom.shared.config.kv_tiers import check_kv_tiers
from atom.shared.config.model import ModelConfig
from atom.shared.config.online_quantization import online_quantization
from atom.shared.config.parallel import ParallelConfig
from atom.shared.config.resolve_parallel import resolve_parallel
from atom.shared.config.resolve_speculative import check_drafting, resolve_speculative
from atom.shared.config.scheduler import SchedulerConfig

Device = Literal["cpu", "cuda"]
Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class DeviceCapabilities:
    """The host, as the preparation step found it."""

    cuda: int = 0
    """GPUs that torch can use, NVIDIA or ROCm."""
    rocm: bool = False
    names: list[str] = field(default_factory=list)
    """One name per GPU."""
    gpu_dtypes: list[str] = field(default_factory=list)
    """Compute dtypes that all GPUs support."""
    gpu_problem: str = ""
    """Why torch cannot use the GPU that the host seems to have."""
    cpu_dtypes: list[str] = field(default_factory=lambda: ["float32"])
    """Compute dtypes with native CPU instructions."""
    cpu_cores: int = 1
    """Cores that this process may use."""


@dataclass(frozen=True)
class Resolved:
    """The resolved configuration, and log lines for the user."""

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

_MOST_CAPTURED = 512
_MOST_RECORDED = 64
"""Rows of a decode step that a CPU records."""
_GRAPHS = 3
"""The --level that captures graphs."""
# Features of a model from which operators on a CPU take longer than handing their parts to threads.
_THREADED_WIDTH = 256

# RoPE types whose frequencies depend on the length of the text.
_ROPE_BY_LENGTH = ("dynamic", "longrope")

_CPU_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16"}


def resolve(
    config: EngineConfig, checkpoint: Checkpoint, explicit: set[str], capabilities: DeviceCapabilities
) -> Resolved:
    """Resolve every field that the user did not set; `explicit` are the names of those set.

    Raises ConfigError for a setting that the checkpoint or the host does not support.
    """
    notes: list[str] = []
    config = replace(config, parallel=resolve_parallel(config.parallel, checkpoint, notes))
    device = _device(config, capabilities, notes)
    dtype = _dtype(config.model.dtype, device, checkpoint, capabilities, notes)
    if config.device.batch_invariant and device == "cpu":
        raise ConfigError("--batch-invariant needs a GPU: on a CPU the order of sums depends on the batch")
    if config.device.batch_invariant and checkpoint.keeps_states:
        raise ConfigError(
            f"--batch-invariant: {checkpoint.model_type} computes its recurrent states in the chunks of each "
            "step, and rounding depends on the chunks; omit the flag"
        )
    _check_length(config.model, checkpoint)
    _check_online_quantization(config.model, checkpoint)
    check_kv_tiers(config.cache, config.parallel)
    image_limit(config.model.limit_mm_per_prompt)  # raises for one that cannot act
    cache = _cache(config.cache, checkpoint, notes)
    _check_level(config)
    kv_events_config(cache, config.parallel.data_parallel_size)  # raises for one that cannot act
    notes += _without_effect(config, checkpoint, explicit, device)
    if checkpoint.ignored_defaults:
        names = ", ".join(checkpoint.ignored_defaults)
        notes.append(f"generation_config.json also sets {names}: not supported, ignored")
    notes += [*checkpoint.warnings, *_rope_notes(config.model, checkpoint)]
    speculative = resolve_speculative(config.speculative, checkpoint, notes)
    check_drafting(speculative, config.device.level)
    images = checkpoint.images
    image = images.max_tokens if images is not None and images.sees_ahead and speculative.reads_images else 0
    scheduler = _scheduler(config.scheduler, _DEFAULTS[device], speculative.num_speculative_tokens, image)
    resolved = replace(
        config,
        model=_model(config.model, dtype),
        cache=cache,
        scheduler=scheduler,
        speculative=speculative,
        device=_threads(
            _graphs(replace(config.device, device=device), scheduler, config.parallel, explicit),
            config,
            capabilities,
            checkpoint,
        ),
    )
    return Resolved(resolved, notes)


def _device(config: EngineConfig, capabilities: DeviceCapabilities, notes: list[str]) -> Device:
    wanted = config.device.device
    parallel = config.parallel
    needed = parallel.workers_per_node
    if wanted == "cpu":
        return "cpu"
    if capabilities.cuda == 0:
        if wanted == "cuda":
            problem = capabilities.gpu_problem or "this host has no GPU"
            raise ConfigError(f"--device cuda needs a GPU: {problem}; use --device cpu")
        if capabilities.gpu_problem:
            notes.append(f"computing on the CPU: {capabilities.gpu_problem}")
        return "cpu"
    if needed > capabilities.cuda:
        size = f"--tensor-parallel-size {parallel.tensor_parallel_size}"
        if parallel.nnodes > 1:
            size += f" on {parallel.nnodes} nodes"
        if parallel.data_parallel_size > 1:
            size += f" with --data-parallel-size {parallel.data_parallel_size}"
        raise ConfigError(
            f"{size} needs {needed} GPUs, torch found {capabilities.cuda}; use at most {capabilities.cuda}"
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
        notes.append(f"--dtype {wanted}: {place} has no {arithmetic} instructions, so it is slow")
        return cast(Dtype, dtype)
    # float16 needs half the memory of float32; on a CPU only float32 is fast then.
    chosen: Dtype = "float16" if device == "cuda" and "float16" in native else "float32"
    notes.append(f"{place} has no {arithmetic} instructions: using {chosen} (--dtype {dtype} overrides this)")
    return chosen


def _check_length(model: ModelConfig, checkpoint: Checkpoint) -> None:
    limit = checkpoint.max_model_len
    if model.max_model_len is not None and model.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len {model.max_model_len}: the checkpoint supports {limit} tokens; "
            f"use at most {limit}"
        )


def _rope_notes(model: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """A note where RoPE scales differently than in transformers, for texts below the scaled length."""
    rope = checkpoint.hf_config.get("rope_parameters", {})
    original = rope.get("original_max_position_embeddings")
    longest = model.max_model_len or checkpoint.max_model_len
    if rope.get("rope_type") not in _ROPE_BY_LENGTH or not original or longest <= original:
        return []
    return [
        f"RoPE ({rope['rope_type']}) is scaled for {longest} tokens, also in shorter texts: if none has more "
        f"than {original}, --max-model-len {original} leaves it unscaled, which is more accurate"
    ]


def _check_online_quantization(model: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for settings that do not fit, or for a checkpoint that is quantized already."""
    stated = checkpoint.hf_config.get("quantization_config")
    if online_quantization(model.online_quant_config) is not None and stated:
        raise ConfigError(
            f"--online-quant-config quantizes plain checkpoints, and {checkpoint.directory} is quantized "
            f"({stated.get('quant_method', 'unknown')}): omit the flag"
        )


def _cache(cache: CacheConfig, checkpoint: Checkpoint, notes: list[str]) -> CacheConfig:
    """`auto` is the format that the checkpoint asks for."""
    if cache.kv_cache_dtype != "auto":
        return cache
    wanted = kv_format(checkpoint.hf_config.get("quantization_config"))
    if wanted is None:
        return cache
    if wanted != FP8:
        raise ConfigError(
            f"the checkpoint asks for a KV cache in {wanted:.40}, which is not supported: choose "
            "--kv-cache-dtype fp8 or bf16"
        )
    notes.append("the checkpoint asks for an FP8 KV cache: using it (--kv-cache-dtype bf16 overrides this)")
    return replace(cache, kv_cache_dtype="fp8")


def _model(model: ModelConfig, dtype: Dtype) -> ModelConfig:
    return replace(model, dtype=dtype, served_model_name=model.served_model_name or model.model)


def _scheduler(
    scheduler: SchedulerConfig, defaults: _DeviceDefaults, num_drafts: int, image: int
) -> SchedulerConfig:
    """A step has room for the drafts of all sequences and `image` tokens: unset limits adapt."""
    each = 1 + num_drafts
    tokens = scheduler.max_num_batched_tokens
    rows = scheduler.max_num_seqs
    if num_drafts and tokens is not None and (rows or 1) * each > tokens:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} has no room for {rows or 1} sequences with "
            f"{num_drafts} draft tokens each: use at least {(rows or 1) * each}, or fewer "
            "--num-speculative-tokens or --max-num-seqs"
        )
    if rows is None:
        rows = defaults.max_num_seqs
        if tokens is not None and (num_drafts or image):
            rows = min(rows, max((tokens - image) // each, 1))
    if tokens is None:
        tokens = defaults.max_num_batched_tokens
        if num_drafts or image:
            tokens = max(tokens, rows * each + image)
    if image and tokens < rows * each + image:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens}: a step computes a whole image of this model, {image} "
            f"tokens, and {rows * each} of sequences that generate: use at least {rows * each + image}, a "
            "smaller --max-num-seqs, or --limit-mm-per-prompt '{\"image\": 0}' for text alone"
        )
    _check_mixed(scheduler.max_num_mixed_tokens, tokens, min(rows * each, tokens))
    return replace(scheduler, max_num_batched_tokens=tokens, max_num_seqs=rows)


def _check_mixed(mixed: int | None, tokens: int, decodes: int) -> None:
    """Raise ConfigError unless such steps have room for all sequences that generate."""
    if mixed is not None and not decodes <= mixed <= tokens:
        raise ConfigError(
            f"--max-num-mixed-tokens {mixed} must be from {decodes}, the tokens of all sequences that may "
            f"generate (--max-num-seqs), to {tokens} (--max-num-batched-tokens)"
        )


def _check_level(config: EngineConfig) -> None:
    """Raise ConfigError for settings that a compiled pass, or one in pieces, cannot honour."""
    device = config.device
    traced = config.observability.mark_trace
    if traced and device.cudagraph_mode in ("PIECEWISE", "FULL_AND_PIECEWISE"):
        raise ConfigError(
            f"--mark-trace names the modules of whole graphs: with --cudagraph-mode {device.cudagraph_mode} "
            "omit it, or use FULL"
        )
    if device.level not in COMPILERS:
        return
    if config.parallel.tensor_parallel_size > 1 or config.parallel.enable_expert_parallel:
        raise ConfigError(
            f"--level {device.level} compiles a model that one worker has as a whole: use --level 3 with "
            "several workers for a model"
        )
    if traced:
        raise ConfigError(f"--mark-trace: --level {device.level} compiles modules together; use --level 3")


def _graphs(
    device: DeviceConfig, scheduler: SchedulerConfig, parallel: ParallelConfig, explicit: set[str]
) -> DeviceConfig:
    """Sets the mode, by --level, and the batch sizes to capture; none without graphs.

    A CPU records decode steps; not those with collectives or compiled code, whose calls torch does not show.
    """
    if device.level < _GRAPHS and "cudagraph_mode" not in explicit:
        device = replace(device, cudagraph_mode="NONE")
    if device.device == "cpu" and device.cudagraph_mode != "NONE":
        is_hidden = parallel.workers_in_mesh > 1 or device.level in COMPILERS
        device = replace(device, cudagraph_mode="NONE" if is_hidden else "FULL_DECODE_ONLY")
    if device.enforce_eager or device.cudagraph_mode == "NONE":
        return replace(device, cudagraph_capture_sizes="[]")
    if device.cudagraph_capture_sizes is not None:
        return device
    assert scheduler.max_num_seqs is not None
    sizes = _cpu_sizes(scheduler.max_num_seqs) if device.device == "cpu" else _sizes(scheduler.max_num_seqs)
    return replace(device, cudagraph_capture_sizes=str(sizes))


def _sizes(max_num_seqs: int) -> list[int]:
    most = min(max_num_seqs, _MOST_CAPTURED)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, _MOST_CAPTURED, 16), most}
    return sorted(size for size in sizes if size <= most)


def _cpu_sizes(max_num_seqs: int) -> list[int]:
    """Close to each other, since a padding row takes as long as another; of more rows Python takes little."""
    most = min(max_num_seqs, _MOST_RECORDED)
    sizes = {*range(1, 8), *range(8, 16, 2), *range(16, 32, 4), *range(32, _MOST_RECORDED, 8), most}
    return sorted(size for size in sizes if size <= most)


def _threads(
    device: DeviceConfig, config: EngineConfig, capabilities: DeviceCapabilities, checkpoint: Checkpoint
) -> DeviceConfig:
    if device.device == "cuda" or device.cpu_threads is not None:
        return device
    if checkpoint.hf_config.get("hidden_size", _THREADED_WIDTH) < _THREADED_WIDTH:
        return replace(device, cpu_threads=1)
    workers = config.parallel.workers_per_node
    threads = capabilities.cpu_cores // workers
    return replace(device, cpu_threads=max(1, threads))


def _without_other_servers(transfer: PromptTransfer) -> dict[str, str]:
    """By setting, why it has no effect."""
    needed = "it needs NixlConnector in --kv-transfer-config, without --prefill-engines and as"
    reasons = {}
    if not transfer.gives:
        reasons = dict.fromkeys(("kv_transfer_host", "kv_transfer_port"), f"{needed} kv_producer or kv_both")
    if not transfer.takes:
        reasons["kv_transfer_peers"] = f"{needed} kv_consumer or kv_both"
    return reasons


def _without_effect(
    config: EngineConfig, checkpoint: Checkpoint, explicit: set[str], device: Device
) -> list[str]:
    """A log line for each explicit setting that has no effect here."""
    cache = config.cache
    memory_rule = "kv_cache_memory_bytes" if cache.num_kv_blocks is None else "num_kv_blocks"
    memory_given = cache.num_kv_blocks is not None or cache.kv_cache_memory_bytes is not None
    reasons = (
        {}
        if config.parallel.nnodes > 1
        else {
            "port": "all processes are on one node and use local sockets; the HTTP port is --server-port",
        }
    )
    if device == "cpu":
        reasons["gpu_memory_utilization"] = "on a CPU, --kv-cache-memory-bytes sets the KV cache"
        if config.device.cudagraph_mode in ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE"):
            reasons["cudagraph_mode"] = "a CPU records decode steps, as FULL_DECODE_ONLY does, or NONE"
        if config.parallel.workers_in_mesh > 1 or config.device.level in COMPILERS:
            unrecorded = "a CPU does not record steps with collectives or compiled code"
            reasons |= dict.fromkeys(("cudagraph_mode", "cudagraph_capture_sizes"), unrecorded)
    else:
        reasons["cpu_threads"] = "the workers run on GPUs"
        if memory_given:
            reasons["gpu_memory_utilization"] = f"--{memory_rule.replace('_', '-')} sets the KV cache"
    if config.parallel.data_parallel_size == 1:
        reasons["dp_load_balance"] = "one engine serves all requests; --data-parallel-size adds more"
    # The layers of a draft model are not known here.
    may_keep_states = checkpoint.keeps_states or config.speculative.method == "draft_model"
    if not may_keep_states or not cache.enable_prefix_caching:
        reasons["state_checkpoint_interval_tokens"] = "it is for recurrent layers with prefix caching"
    if not cache.offloads:
        tiers = "--kv-offload-memory, --kv-offload-dir or --kv-offload-remote-url"
        reasons["kv_offload_min_tokens"] = f"it needs {tiers}"
    if config.observability.torch_profiler_dir is None:
        reasons["mark_trace"] = "it needs --torch-profiler-dir"
    if checkpoint.images is None and image_limit(config.model.limit_mm_per_prompt):
        reasons["limit_mm_per_prompt"] = "this model reads text alone"
    if config.model.trust_remote_code:
        reasons["trust_remote_code"] = "code from a checkpoint is never run"
    if config.parallel.num_workers == 1:
        reasons["enable_expert_parallel"] = "one worker has all experts; it acts with -tp or -dp"
        reasons["enable_dp_attention"] = "there is one worker; it acts with -tp or -dp"
    if not config.parallel.enable_eplb:
        reasons["eplb_config"] = "it needs --enable-eplb"
    if not config.parallel.prefill_engines:
        reasons["prefill_min_tokens"] = "it needs --prefill-engines"
    reasons |= _without_other_servers(prompt_transfer(cache, config.parallel))
    if not config.parallel.lockstep:
        reasons["all2all_backend"] = (
            "tokens travel between data-parallel ranks that share experts: it acts with "
            "--enable-expert-parallel and --data-parallel-size"
        )
    if cache.num_kv_blocks is not None:
        reasons["kv_cache_memory_bytes"] = "--num-kv-blocks overrides it"
    return [
        f"--{name.replace('_', '-')} has no effect: {reason}"
        for name, reason in reasons.items()
        if name in explicit
    ]
