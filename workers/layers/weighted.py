"""Layers whose tensors come from a checkpoint, and what each rank keeps of them.

A layer does not read files. It declares, for each of its weights, the tensors on disk that
are stacked into it and the range that this rank keeps; `workers.weights` does the reading.

    disk:  q_proj.weight [9*E, D]   k_proj.weight [3*E, D]   v_proj.weight [3*E, D]
                 | rows 0..6*E            | rows 0..2*E            | rows 0..2*E
                 v                        v                        v
    rank 0: qkv_proj.weight [(6+2+2)*E, D]
"""

from collections.abc import Sequence
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
class Source:
    """One tensor on disk, and the range of it that this rank keeps along `dim`."""

    shape: tuple[int, ...]
    dim: int
    kept: Range

    @property
    def kept_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.kept.size, *self.shape[self.dim + 1 :])


class WeightedLayer(nn.Module):
    """Base of every layer with weights. `sources[name]` fill buffer `name`, stacked along rows."""

    sources: dict[str, tuple[Source, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.sources = {}

    def add_weight(self, name: str, sources: Sequence[Source], build: BuildContext) -> None:
        """Make the buffer `name`, uninitialised, in the shape that its sources fill."""
        rows = sum(source.kept_shape[0] for source in sources)
        shape = (rows, *sources[0].kept_shape[1:])
        self.register_buffer(name, torch.empty(shape, dtype=build.dtype, device=build.device))
        self.sources[name] = tuple(sources)

    def destination(self, name: str, index: int) -> torch.Tensor:
        """The rows of buffer `name` that its source number `index` fills."""
        rows = [source.kept_shape[0] for source in self.sources[name]]
        buffer: torch.Tensor = self.get_buffer(name)
        return buffer.narrow(0, sum(rows[:index]), rows[index])

    def finish_loading(self) -> None:
        """Called once all weights of the model are in place: bring them into their final form."""
