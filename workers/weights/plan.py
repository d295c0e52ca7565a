"""Which checkpoint tensors fill which buffers of a model, and the shard that this rank keeps of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from workers.layers.causal_lm import CausalLM
from workers.layers.weighted import CheckpointTensor, ShardSpec, WeightedLayer


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where one shard is loaded to: `buffer` receives the range that `shard` keeps."""

    name: str
    """Of the checkpoint tensor, or made from the layer's name where several tensors are decoded."""
    shard: ShardSpec
    buffer: torch.Tensor
    tensors: tuple[CheckpointTensor, ...]
    """The checkpoint tensors to read, with their full names."""


def weighted_layers(model: CausalLM) -> Iterator[tuple[str, WeightedLayer]]:
    """(module path, layer) of every layer with weights."""
    for path, module in model.named_modules():
        if isinstance(module, WeightedLayer):
            yield path, module


def load_targets(model: CausalLM) -> Iterator[LoadTarget]:
    """One for each matrix or vector to load; a fused projection has one for each tensor stacked into it."""
    for module_path, layer in weighted_layers(model):
        path = ".".join(model.renamed_on_disk.get(name, name) for name in module_path.split("."))
        parent, _, last = path.rpartition(".")
        modules = model.packed_modules_mapping.get(last, (last,))
        for weight, shards in layer.shards.items():
            buffers = layer.shard_views(weight)
            if shards[0].tensors:
                yield from _decoded_targets(path, weight, shards, buffers)
                continue
            for module, shard, buffer in zip(modules, shards, buffers, strict=True):
                name = _joined(parent, module, weight)
                yield LoadTarget(name, shard, buffer, (CheckpointTensor(name, shard.shape),))


def _decoded_targets(
    path: str, weight: str, shards: tuple[ShardSpec, ...], buffers: list[torch.Tensor]
) -> Iterator[LoadTarget]:
    for number, (shard, buffer) in enumerate(zip(shards, buffers, strict=True)):
        tensors = tuple(replace(tensor, name=_joined(path, tensor.name)) for tensor in shard.tensors)
        yield LoadTarget(_joined(path, str(number), weight), shard, buffer, tensors)


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))
