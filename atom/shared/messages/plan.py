"""What `python -m workers.memory.plan_memory` is asked, and what it prints: one line of JSON."""

import msgspec

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.worker import KVSpec


class PlanLaunch(msgspec.Struct, frozen=True):
    """For `python -m workers.memory.plan_memory`."""

    config: EngineConfig
    """The resolved configuration."""
    checkpoint: Checkpoint
    sizes: list[int]
    """Tensor-parallel sizes to plan: all ranks of the configured one, rank 0 of the others."""
    gpu_bytes: int | None = None
    """Memory of each assumed GPU; None: the devices of this host."""


class RankPlan(msgspec.Struct, frozen=True):
    """The memory of one rank, without the activations of a step and captured graphs."""

    rank: int
    weight_bytes: int
    """As the rank reports it in `Loaded`."""
    weights: dict[str, int]
    """Bytes of each type of weight."""
    kv_specs: list[KVSpec]
    kv_bytes: int
    """Configured size of the KV cache; if unset, what is left for it. On a GPU that is an upper bound: what
    `buffer_bytes`, `dispatch_bytes` and the logits of a step leave; other activations are measured at
    start."""
    left_bytes: int
    """What the weights leave for everything else; negative if they do not fit."""
    buffer_bytes: int = 0
    """For experts on their way between ranks, with --enable-eplb."""
    dispatch_bytes: int = 0
    """Symmetric memory for the tokens on their way to experts of other ranks, with MORI."""


class LayoutPlan(msgspec.Struct, frozen=True):
    """The model split over `tensor_parallel_size` ranks."""

    tensor_parallel_size: int
    ranks: list[RankPlan]
    """Empty if the model cannot be split so."""
    problem: str = ""
    """Why not, in one line."""


class PlanResult(msgspec.Struct, frozen=True):
    """All layouts, or an error in one line."""

    error: str = ""
    layouts: list[LayoutPlan] = []
    device_bytes: int = 0
    """Memory of the smallest GPU, or what is available on this host for workers on the CPU."""
    logits_bytes: int = 0
    """float32 logits of the largest step, on each rank."""
