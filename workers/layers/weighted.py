"""Layers whose tensors come from a checkpoint, and what each rank keeps of them.

A layer does not read files. It declares, for each of its weights, the tensors on disk that
are stacked into it and the range that this rank keeps; `workers.weights` does the reading.

    disk:  q_proj.weight [9*E, D]   k_proj.weight [3*E, D]   v_proj.weight [3*E, D]
                 | rows 0..6*E            | rows 0..2*E            | rows 0..2*E
                 v                        v                        v
    rank 0: qkv_proj.weight [(6+2+2)*E, D]

Most matrices are on disk as themselves, under the name of their layer. Those that are not (one
of many in a tensor, transposed, packed) say from which tensors they are made, and how.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from workers.layers.context import BuildContext


@dataclass(frozen=True, slots=True)
class Range:
    """The entries `start .. start + size` that a rank keeps of a dimension of `total`."""

    total: int
    start: int
    size: int

    @classmethod
    def whole(cls, total: int) -> "Range":
        return cls(total, 0, total)


@dataclass(frozen=True, slots=True)
class DiskTensor:
    """A tensor on disk, or one entry of its first dimension."""

    name: str
    """Below the layer's own name."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    entry: int | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """One matrix or vector of a checkpoint, and the range of it that this rank keeps along `dim`."""

    shape: tuple[int, ...]
    dim: int
    kept: Range
    parts: tuple[DiskTensor, ...] = ()
    """What it is made from; empty: it is on disk as itself, under the name of the layer's weight."""
    decode: Callable[..., torch.Tensor] | None = None
    """From the parts to `shape`; None: the only part is of that shape."""

    @property
    def kept_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.kept.size, *self.shape[self.dim + 1 :])

    @property
    def index(self) -> tuple[slice, ...]:
        """The kept range, as an index into the whole."""
        return (*[slice(None)] * self.dim, slice(self.kept.start, self.kept.start + self.kept.size))


class WeightedLayer(nn.Module):
    """Base of every layer with weights. `sources[name]` fill buffer `name`, stacked along rows."""

    sources: dict[str, tuple[Source, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.sources = {}

    def add_weight(
        self, name: str, sources: Sequence[Source], build: BuildContext, dtype: torch.dtype | None = None
    ) -> None:
        """Make the buffer `name`, uninitialised, in the shape that its sources fill."""
        rows = sum(source.kept_shape[0] for source in sources)
        shape = (rows, *sources[0].kept_shape[1:])
        buffer = torch.empty(shape, dtype=dtype or build.dtype, device=build.device)
        self.register_buffer(name, buffer)
        self.sources[name] = tuple(sources)

    def destinations(self, name: str) -> list[torch.Tensor]:
        """The rows of buffer `name` that each of its sources fills."""
        rows = [source.kept_shape[0] for source in self.sources[name]]
        buffer: torch.Tensor = self.get_buffer(name)
        return list(buffer.split(rows))

    def process_weights_after_loading(self) -> None:
        """Called once all weights of the model are in place: bring them into their final form."""
