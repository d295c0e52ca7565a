"""Which checkpoint tensors fill which buffers of a model, and the shard that this rank keeps of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from workers.layers.causal_lm import CausalLM
from workers.layers.weighted import CheckpointTensor, ShardSpec, WeightedLayer


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where one shard is loaded to: some rows of a layer's weight.

    It references the layer and not the tensor, which would keep the plain weight in memory after
    `process_weights_after_loading` has replaced it.
    """

    name: str
    """Of the checkpoint tensor, or made from the layer's name where several tensors are decoded."""
    shard: ShardSpec
    tensors: tuple[CheckpointTensor, ...]
    """The checkpoint tensors to read, with their full names."""
    layer: WeightedLayer
    weight: str
    """Name of the layer's buffer."""
    first_row: int

    @property
    def buffer(self) -> torch.Tensor:
        """The rows to fill, as a view of the weight."""
        return self.layer.get_buffer(self.weight).narrow(0, self.first_row, self.shard.kept_shape[0])


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
            if shards[0].tensors:
                named = _decoded(path, weight, shards)
            else:
                named = _plain([_joined(parent, module, weight) for module in modules], shards)
            first_row = 0
            for (name, tensors), shard in zip(named, shards, strict=True):
                yield LoadTarget(name, shard, tensors, layer, weight, first_row)
                first_row += shard.kept_shape[0]


_Named = tuple[str, tuple[CheckpointTensor, ...]]
"""`name` and `tensors` of a `LoadTarget`."""


def _plain(names: list[str], shards: tuple[ShardSpec, ...]) -> list[_Named]:
    """Each shard is a range of one checkpoint tensor."""
    return [(name, (CheckpointTensor(name, shard.shape),)) for name, shard in zip(names, shards, strict=True)]


def _decoded(path: str, weight: str, shards: tuple[ShardSpec, ...]) -> list[_Named]:
    """Each shard names the checkpoint tensors that it is decoded from, relative to the layer at `path`."""
    return [
        (
            _joined(path, str(number), weight),
            tuple(replace(tensor, name=_joined(path, tensor.name)) for tensor in shard.tensors),
        )
        for number, shard in enumerate(shards)
    ]


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))
