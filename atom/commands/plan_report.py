"""What `atom-launch --plan` found, and its text."""

from collections.abc import Iterator

import msgspec

from atom.shared.messages.plan import RankPlan
from atom.shared.messages.worker import FullAttentionSpec, KVSpec, RecurrentStateSpec
from atom.shared.utils.sizes import size_text
from atom.shared.utils.version import atom_version


class Capacity(msgspec.Struct, frozen=True):
    """What fits a layout."""

    tensor_parallel_size: int
    weight_bytes: int
    """Bytes of weights on the rank that has most."""
    problem: str = ""
    """Why nothing fits, in one line."""
    kv_tokens: int = 0
    """Tokens in the KV cache of one engine. On a GPU at most: a step is measured at start."""
    max_model_len: int = 0
    """Longest context."""
    num_blocks: list[int] = []
    requests: dict[int, int] = {}
    """Tokens of a request -> how many such requests can run at once."""


class Plan(msgspec.Struct, frozen=True):
    """Everything that --plan shows."""

    model: str
    architecture: str
    dtype: str
    device: str
    devices: int
    """GPUs of this host, or assumed ones; 1 on a CPU."""
    device_bytes: int
    """Memory of the smallest GPU, or what is available on this host."""
    assumed: bool
    tensor_parallel_size: int
    data_parallel_size: int
    engines: str
    """The engines and their workers in words."""
    ranks: list[RankPlan]
    """Those of one engine; with experts spread over engines no other has more."""
    context: int
    """Longest context of the checkpoint, or --max-model-len."""
    logits_bytes: int
    """The part of a step's memory that is known before it is measured at start."""
    layout: Capacity
    layouts: list[Capacity]
    """The same for other tensor-parallel sizes that the GPUs allow."""
    suggestion: int | None
    """Smallest tensor-parallel size for the whole context, else for the longest one; None: none fits."""
    notes: list[str]
    enable_dp_attention: bool = False
    """Each worker is an engine: only this layout was planned."""


_LABEL = 9


def plan_text(plan: Plan) -> str:
    """The text, with a heading and one line for each subject."""
    return "\n".join(
        [
            f"ATOM {atom_version()}: plan for {plan.model}, no weights loaded",
            *(f"  {label:<{_LABEL}} {text}" for label, text in _rows(plan)),
        ]
    )


def _rows(plan: Plan) -> Iterator[tuple[str, str]]:
    layout = plan.layout
    yield "model", f"{plan.architecture}, {plan.dtype}"
    yield "devices", _devices(plan)
    yield "layout", plan.engines
    yield "weights", _weights(plan)
    if buffers := plan.ranks[0].buffer_bytes:
        yield "buffers", f"{size_text(buffers)} on each rank, for experts on their way to another one"
    if symmetric := plan.ranks[0].dispatch_bytes:
        yield (
            "MORI",
            f"{size_text(symmetric)} of symmetric memory on each rank, for tokens on their way to experts",
        )
    for number, spec in enumerate(plan.ranks[0].kv_specs):
        yield ("" if number else "KV cache"), _kv(spec)
    if layout.problem:
        yield "problem", layout.problem
    else:
        at_most = "at most " if plan.device == "cuda" else ""
        yield "capacity", f"{at_most}{layout.kv_tokens:,} tokens in the KV cache of an engine"
        yield "context", f"{layout.max_model_len:,} of {plan.context:,} tokens"
        counts = (f"{count:,} of {length:,} tokens" for length, count in layout.requests.items())
        yield "requests", "at once, in an engine: " + ", ".join(counts)
    yield "step", _step(plan)
    for each in plan.layouts:
        yield f"-tp {each.tensor_parallel_size}", _other(each)
    if plan.device == "cuda":
        yield "use", _suggestion(plan)
    for note in plan.notes:
        yield "note", note


def _devices(plan: Plan) -> str:
    if plan.device == "cpu":
        return f"CPU, {size_text(plan.device_bytes)} of memory available"
    kind = "assumed GPUs" if plan.assumed else "GPUs"
    return f"{plan.devices} {kind} of {size_text(plan.device_bytes)}"


def _weights(plan: Plan) -> str:
    most = max(plan.ranks, key=lambda rank: rank.weight_bytes)
    kinds = ", ".join(f"{name} {size_text(count)}" for name, count in most.weights.items() if count)
    total = sum(rank.weight_bytes for rank in plan.ranks)
    each = f"{size_text(most.weight_bytes)} on each rank" if len(plan.ranks) > 1 else size_text(total)
    if any(rank.weight_bytes != most.weight_bytes for rank in plan.ranks):
        each = f"up to {each}"
    where = "in all" if plan.data_parallel_size == 1 else "in each engine"
    whole = f"; {size_text(total)} {where}" if len(plan.ranks) > 1 else ""
    return f"{each} ({kinds}){whole}"


def _kv(spec: KVSpec) -> str:
    if isinstance(spec, RecurrentStateSpec):
        return f"{size_text(spec.bytes_per_slot)} a request on a rank (recurrent states)"
    each = f"{size_text(spec.bytes_per_block // spec.block_size)} a token on a rank"
    if isinstance(spec, FullAttentionSpec):
        return f"{each} (blocks of {spec.block_size})"
    return f"{each} for the last {spec.window:,} tokens (blocks of {spec.block_size})"


def _step(plan: Plan) -> str:
    logits = f"at least {size_text(plan.logits_bytes)} (logits)"
    if plan.device == "cuda":
        return f"{logits}; measured at start, with captured graphs, and taken from the KV cache"
    return f"{logits}; taken from the memory that weights and KV cache leave"


def _other(capacity: Capacity) -> str:
    if capacity.problem:
        return f"does not fit: {capacity.problem}"
    return (
        f"{size_text(capacity.weight_bytes)} of weights on a rank, at most {capacity.kv_tokens:,} tokens in "
        f"the KV cache, {capacity.max_model_len:,} a request"
    )


def _suggestion(plan: Plan) -> str:
    if plan.suggestion is None:
        rank = plan.ranks[0]
        usable = rank.weight_bytes + rank.left_bytes
        total = sum(rank.weight_bytes for rank in plan.ranks)
        least = f": the weights alone fill {-(-total // usable)} of these" if usable > 0 else ""
        return f"more GPUs, or larger ones{least}"
    if plan.enable_dp_attention:
        return f"-dp {plan.data_parallel_size} --enable-dp-attention"
    return f"-tp {plan.suggestion}"
