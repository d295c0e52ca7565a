"""What a model is built for, and what one forward pass carries beside the tokens.

Both travel as arguments; nothing in the workers reads a global.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from atom_ops import AttentionPlan, KVLayer, LatentLayer, StateLayer, StatePlan, TopKIndices
from parallel.communicator import Communicator

CacheLayer = KVLayer | LatentLayer | StateLayer
"""What one layer keeps of its tokens, or of its requests."""


@dataclass(frozen=True)
class BuildContext:
    """Where and how the layers of one rank are made."""

    dtype: torch.dtype
    device: torch.device
    tp: Communicator
    max_positions: int
    """Longest sequence that will ever run: the size of the rotary tables."""


@dataclass(frozen=True, slots=True)
class GroupContext:
    """One KV group's share of a step: where its tokens are written, and how they are read."""

    slots_T: torch.Tensor
    """int64: block * block_size + offset of each token."""
    plan: AttentionPlan


@dataclass(slots=True)
class Choice:
    """What sparse attention reads, from the layer that chose it to those that share it."""

    tokens: TopKIndices | None = None
    """None: all that is seen."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What attention needs in one step."""

    kv_layers: Sequence[CacheLayer]
    """By layer index."""
    groups: Sequence[GroupContext | StatePlan]
    """By KV group; a plan where it keeps states."""
    choice: Choice = field(default_factory=Choice)
    """Of the latest layer that made one."""
