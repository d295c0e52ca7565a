"""`atom-launch --plan`: what a model needs and what fits, before a byte of its weights is loaded."""

import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from atom.commands.plan_report import Capacity, Plan, plan_text
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.fields import ConfigError
from atom.shared.config.resolve import DeviceCapabilities, resolve
from atom.shared.messages.plan import LayoutPlan, PlanLaunch, PlanResult
from atom.shared.messages.worker import KVSpec, Loaded
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.process import last_line, spawn
from atom.shared.utils.sizes import size_text
from atom.supervisor import StartError, Supervisor
from atom.supervisor.child import how_it_ended
from atom.supervisor.progress import ProgressBars
from engine_core.kv_cache.kv_plan import peak_blocks
from engine_core.startup import StartupError, plan_cache

DEADLINE_S = 600.0
_LENGTHS = (1024, 8192, 32768, 131072)
_GPUS = re.compile(r"([1-9]\d{0,4})x(\d{1,5}(?:\.\d+)?)")
_GPU_DTYPES = ["bfloat16", "float16", "float32"]


def show_plan(
    config: EngineConfig, explicit: set[str], gpus: str, as_json: bool, on_turn: Callable[[], None]
) -> int:
    """Print the plan; returns the exit status: 0 if the configured layout fits, else 4.

    `gpus` are assumed ones, as 8x80; empty: this host. `on_turn` is called several times a second. Raises
    StartError or ConfigError.
    """
    plan = make_plan(config, explicit, gpus, on_turn)
    print(msgspec.json.format(msgspec.json.encode(plan)).decode() if as_json else plan_text(plan))
    return ExitStatus.RESOURCES if plan.layout.problem else ExitStatus.DONE


def make_plan(config: EngineConfig, explicit: set[str], gpus: str, on_turn: Callable[[], None]) -> Plan:
    """Prepare the checkpoint without its weights, and plan it. Raises StartError or ConfigError."""
    count, size = _assumed(gpus, config)
    bars = ProgressBars()
    with Supervisor(bars.update, on_turn) as supervisor:
        without_weights = replace(config.model, load_dummy=True)
        checkpoint, capabilities, draft_model = supervisor.prepare(without_weights, config.speculative)
    bars.close()
    if size is not None:
        capabilities = replace(capabilities, cuda=count, rocm=False, gpu_dtypes=_GPU_DTYPES)
    if draft_model is not None:
        config = replace(config, speculative=replace(config.speculative, draft_model=draft_model))
    resolved = resolve(config, checkpoint, explicit, capabilities)
    made = resolved.config
    sizes = _sizes(made, checkpoint, capabilities)
    result = _run(PlanLaunch(made, checkpoint, sizes, size), on_turn)
    return _plan(made, checkpoint, capabilities, result, resolved.notes, size is not None)


def _assumed(gpus: str, config: EngineConfig) -> tuple[int, int | None]:
    """Number and bytes of the assumed GPUs; (0, None) for this host. Raises ConfigError."""
    if not gpus:
        return 0, None
    found = _GPUS.fullmatch(gpus)
    if found is None:
        raise ConfigError(
            f"--plan {gpus}: give assumed GPUs as 8x80 (eight with 80 GiB each), or nothing; a model stands "
            "before --plan, or after --model"
        )
    if config.device.device == "cpu":
        raise ConfigError(f"--plan {gpus} assumes GPUs: omit --device cpu")
    return int(found[1]), int(float(found[2]) * (1 << 30))


def _sizes(config: EngineConfig, checkpoint: Checkpoint, capabilities: DeviceCapabilities) -> list[int]:
    """The configured tensor-parallel size, and on GPUs powers of two up to all GPUs of an engine.

    With --enable-dp-attention an engine has one.
    """
    own = config.parallel.tensor_parallel_size
    if config.device.device == "cpu" or config.parallel.enable_dp_attention:
        return [own]
    gpus = capabilities.cuda * config.parallel.nnodes // config.parallel.data_parallel_size
    most = min(gpus, checkpoint.hf_config.get("num_attention_heads", gpus))
    return sorted({own, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


def _run(launch: PlanLaunch, on_turn: Callable[[], None]) -> PlanResult:
    """The child's result; raises StartError."""
    child = spawn("workers.memory.plan_memory", launch, stdout=subprocess.PIPE)
    try:
        line = last_line(child, time.monotonic() + DEADLINE_S, on_turn)
        result = msgspec.json.decode(line, type=PlanResult)
    except TimeoutError:
        raise StartError(f"planning the memory took longer than {DEADLINE_S:.0f} s") from None
    except msgspec.DecodeError:
        raise StartError(f"planning the memory failed: {how_it_ended(child.returncode)}") from None
    if result.error:
        raise StartError(result.error, child.returncode or ExitStatus.FAILURE)
    return result


def _plan(
    config: EngineConfig,
    checkpoint: Checkpoint,
    capabilities: DeviceCapabilities,
    result: PlanResult,
    notes: Sequence[str],
    assumed: bool,
) -> Plan:
    own = config.parallel.tensor_parallel_size
    capacities = [_capacity(config, checkpoint, layout) for layout in result.layouts]
    context = config.model.max_model_len or checkpoint.max_model_len
    on_gpu = config.device.device == "cuda"
    return Plan(
        model=config.model.names[0],
        architecture=checkpoint.architecture,
        dtype=config.model.dtype,
        device=config.device.device,
        devices=capabilities.cuda if on_gpu else 1,
        device_bytes=result.device_bytes,
        assumed=assumed,
        tensor_parallel_size=own,
        data_parallel_size=config.parallel.data_parallel_size,
        engines=config.parallel.layout(config.device.device),
        ranks=next(layout.ranks for layout in result.layouts if layout.tensor_parallel_size == own),
        context=context,
        logits_bytes=result.logits_bytes,
        layout=next(each for each in capacities if each.tensor_parallel_size == own),
        layouts=[each for each in capacities if each.tensor_parallel_size != own],
        suggestion=_suggestion(capacities, context),
        notes=list(notes),
        enable_dp_attention=config.parallel.enable_dp_attention,
    )


def _suggestion(capacities: Sequence[Capacity], context: int) -> int | None:
    fitting = [each for each in capacities if not each.problem]
    whole = [each for each in fitting if each.max_model_len == context]
    if whole:
        return whole[0].tensor_parallel_size
    longest = max(fitting, key=lambda each: each.max_model_len, default=None)
    return longest.tensor_parallel_size if longest else None


def _capacity(config: EngineConfig, checkpoint: Checkpoint, layout: LayoutPlan) -> Capacity:
    """What fits, by the engine core's own rules."""
    size = layout.tensor_parallel_size
    if not layout.ranks:
        return Capacity(size, 0, layout.problem)
    weights = max(rank.weight_bytes for rank in layout.ranks)
    left = min(rank.left_bytes for rank in layout.ranks)
    if left <= 0:
        usable = max(weights + left, 0)
        problem = f"the weights take {size_text(weights)} on a rank, which may use {size_text(usable)}"
        return Capacity(size, weights, problem)
    buffers = layout.ranks[0].buffer_bytes + layout.ranks[0].dispatch_bytes
    loaded = [
        Loaded(rank.rank, rank.kv_specs, rank.kv_bytes, rank.weight_bytes, max(left - buffers, 0))
        for rank in layout.ranks
    ]
    try:
        cache = plan_cache(config, checkpoint.max_model_len, loaded)
    except StartupError as error:
        return Capacity(size, weights, str(error))
    requests = _requests(config, cache.specs, cache.num_blocks, cache.max_model_len)
    return Capacity(size, weights, "", cache.kv_tokens, cache.max_model_len, cache.num_blocks, requests)


def _requests(
    config: EngineConfig, specs: Sequence[KVSpec], num_blocks: Sequence[int], longest: int
) -> dict[int, int]:
    """How many requests of each length can decode at once; without common prefixes."""
    rows = config.scheduler.max_num_seqs or 1
    each = 1 + config.speculative.num_speculative_tokens
    pairs = list(zip(specs, num_blocks, strict=True))
    lengths = [*(length for length in _LENGTHS if length < longest), longest]
    return {
        length: min(rows, *(blocks // peak_blocks(spec, length, each) for spec, blocks in pairs))
        for length in lengths
    }
