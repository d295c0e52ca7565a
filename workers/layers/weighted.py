"""Layers with weights: which checkpoint tensors fill them, and the shard that each rank keeps.

A layer does not read files. For each of its weights it declares the checkpoint tensors that are
stacked into it and the range that this rank keeps; `workers.weights` reads them.

    checkpoint:  q_proj.weight [9*E, D]   k_proj.weight [3*E, D]   v_proj.weight [3*E, D]
                       | rows 0..6*E            | rows 0..2*E            | rows 0..2*E
                       v                        v                        v
    rank 0:      qkv_proj.weight [(6+2+2)*E, D]

Most matrices are stored as they are used, under the name of their layer. For the others (one expert
of a stacked tensor, transposed, quantized) the shard names the tensors to read and how to decode them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from workers.layers.context import BuildContext


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The entries `start .. start + size` that a rank keeps of a dimension of size `total`."""

    total: int
    start: int
    size: int

    @classmethod
    def whole(cls, total: int) -> "ShardRange":
        """The whole dimension: not sharded."""
        return cls(total, 0, total)

    def scaled(self, width: int) -> "ShardRange":
        """The same share of a dimension that has `width` entries for each of these."""
        return ShardRange(self.total * width, self.start * width, self.size * width)


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of the checkpoint, or one entry of its first dimension."""

    name: str
    """Relative to the layer's name."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    entry: int | None = None
    """Index into the first dimension; None: the whole tensor."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One matrix or vector of the checkpoint, and the range of it that this rank keeps along `dim`."""

    shape: tuple[int, ...]
    dim: int
    kept: ShardRange
    tensors: tuple[CheckpointTensor, ...] = ()
    """The tensors it is decoded from; empty: one tensor of this shape, named as the layer's weight."""
    decode: Callable[..., torch.Tensor] | None = None
    """Maps `tensors` to a tensor of `shape`; None: the only tensor has that shape already."""

    @property
    def kept_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.kept.size, *self.shape[self.dim + 1 :])

    @property
    def index(self) -> tuple[slice, ...]:
        """The kept range, as an index into the whole tensor."""
        return (*[slice(None)] * self.dim, slice(self.kept.start, self.kept.start + self.kept.size))


class WeightedLayer(nn.Module):
    """Base of every layer with weights. The shards `shards[name]` fill buffer `name`, stacked along rows."""

    shards: dict[str, tuple[ShardSpec, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.shards = {}

    def add_weight(
        self, name: str, shards: Sequence[ShardSpec], build: BuildContext, dtype: torch.dtype | None = None
    ) -> None:
        """Register the uninitialised buffer `name`, large enough for its shards."""
        rows = sum(shard.kept_shape[0] for shard in shards)
        shape = (rows, *shards[0].kept_shape[1:])
        buffer = torch.empty(shape, dtype=dtype or build.dtype, device=build.device)
        self.register_buffer(name, buffer)
        self.shards[name] = tuple(shards)

    def process_weights_after_loading(self) -> None:
        """Convert the weights to the layout that `forward` needs.

        Called once, as soon as all weights of this layer are loaded; those of other layers may not be.
        """
