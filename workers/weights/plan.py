"""Which tensors of a checkpoint fill which buffers of a model, and what each rank keeps of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from workers.layers.causal_lm import CausalLM
from workers.layers.weighted import Source, WeightedLayer


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor on disk: `target` takes the range that `source` keeps of it."""

    name: str
    source: Source
    target: torch.Tensor

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape == self.source.shape

    @property
    def index(self) -> tuple[slice, ...]:
        """The kept range, as an index into the tensor on disk."""
        kept = self.source.kept
        rest = [slice(None)] * self.source.dim
        return (*rest, slice(kept.start, kept.start + kept.size))


def weighted_layers(model: CausalLM) -> Iterator[tuple[str, WeightedLayer]]:
    """Every layer with weights, by its path."""
    for path, module in model.named_modules():
        if isinstance(module, WeightedLayer):
            yield path, module


def slots(model: CausalLM) -> Iterator[Slot]:
    """Every tensor that the model needs. A fused projection needs each of its parts' tensors."""
    for path, layer in weighted_layers(model):
        parent, _, last = path.rpartition(".")
        parts = model.packed_modules_mapping.get(last, (last,))
        for weight, sources in layer.sources.items():
            for index, (part, source) in enumerate(zip(parts, sources, strict=True)):
                name = ".".join(filter(None, (parent, part, weight)))
                yield Slot(name, source, layer.destination(weight, index))
