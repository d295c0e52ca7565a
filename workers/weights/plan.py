"""Which tensors of a checkpoint fill which buffers of a model, and what each rank keeps of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from workers.layers.causal_lm import CausalLM
from workers.layers.weighted import DiskTensor, Source, WeightedLayer


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one source: `target` takes the range that it keeps."""

    name: str
    """On disk, where it is there as itself; else one of its own."""
    source: Source
    target: torch.Tensor
    parts: tuple[DiskTensor, ...]
    """The tensors to read, by their whole names."""


def weighted_layers(model: CausalLM) -> Iterator[tuple[str, WeightedLayer]]:
    """Every layer with weights, by its path."""
    for path, module in model.named_modules():
        if isinstance(module, WeightedLayer):
            yield path, module


def slots(model: CausalLM) -> Iterator[Slot]:
    """Every matrix that the model needs. A fused projection needs each of its parts'."""
    for module_path, layer in weighted_layers(model):
        path = ".".join(model.renamed_on_disk.get(name, name) for name in module_path.split("."))
        parent, _, last = path.rpartition(".")
        modules = model.packed_modules_mapping.get(last, (last,))
        for weight, sources in layer.sources.items():
            targets = layer.destinations(weight)
            if sources[0].parts:
                yield from _composed(path, weight, sources, targets)
                continue
            for module, source, target in zip(modules, sources, targets, strict=True):
                name = _joined(parent, module, weight)
                yield Slot(name, source, target, (DiskTensor(name, source.shape),))


def _composed(
    path: str, weight: str, sources: tuple[Source, ...], targets: list[torch.Tensor]
) -> Iterator[Slot]:
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        parts = tuple(replace(part, name=_joined(path, part.name)) for part in source.parts)
        yield Slot(_joined(path, str(number), weight), source, target, parts)


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))
