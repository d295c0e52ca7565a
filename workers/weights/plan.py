"""Which checkpoint tensors fill which buffers of a model, and the shard that this rank keeps of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from workers.layers.causal_lm import WeightedModel
from workers.layers.context import path_on_disk
from workers.layers.weighted import CheckpointTensor, ShardSpec, WeightedLayer


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where one shard is loaded to: some rows of a layer's buffer.

    It references the layer and not the tensor, which would keep the plain weight in memory after
    `process_weights_after_loading` has replaced it.
    """

    name: str
    """Name of the checkpoint tensor, or one made from the layer's name if it is one of a stack."""
    shard: ShardSpec
    tensor: CheckpointTensor
    """The checkpoint tensor to read, with its full name."""
    layer: WeightedLayer
    weight: str
    """Name of the layer's weight."""
    first_row: int

    @property
    def buffer(self) -> torch.Tensor:
        """The rows to fill, as a view of the weight; an empty tensor, to `store`, if they are quantized."""
        return self.layer.rows_to_fill(self.weight, self.first_row, self.shard.kept_shape)

    @property
    def device(self) -> torch.device:
        return self.layer.device_of(self.weight)

    def store(self, part: torch.Tensor) -> None:
        """Fill the rows of the weight with the shard, of its `kept_shape`."""
        self.layer.store(self.weight, self.first_row, part)


def weighted_layers(model: WeightedModel) -> Iterator[tuple[str, WeightedLayer]]:
    """(module path, layer) of every layer with weights."""
    for path, module in model.named_modules():
        if isinstance(module, WeightedLayer):
            yield path, module


def load_targets(model: WeightedModel) -> Iterator[LoadTarget]:
    """One for each shard; a fused projection has one for each tensor stacked into it."""
    for module_path, layer in weighted_layers(model):
        path = path_on_disk(module_path, model.renamed_on_disk)
        if layer.prefix not in (None, path):
            raise AssertionError(f"{path} was built as {layer.prefix}: pass it build.at(…) with its name")
        parent, _, last = path.rpartition(".")
        modules = model.packed_modules_mapping.get(last, (last,))
        for weight, shards in layer.shards.items():
            if shards[0].tensor is not None:
                named = _decoded(path, weight, shards)
            else:
                named = _named([_joined(parent, module) for module in modules], weight, shards)
            first_row = 0
            for (name, tensor), shard in zip(named, shards, strict=True):
                yield LoadTarget(name, shard, tensor, layer, weight, first_row)
                first_row += shard.kept_shape[0]


_Named = tuple[str, CheckpointTensor]
"""`name` and `tensor` of a `LoadTarget`."""


def _named(modules: list[str], weight: str, shards: tuple[ShardSpec, ...]) -> list[_Named]:
    """Each shard is a range of a tensor of one of the modules."""
    if shards[0].module is not None:
        modules = [modules[shard.module] for shard in shards if shard.module is not None]
    return [_of_module(module, weight, shard) for module, shard in zip(modules, shards, strict=True)]


def _of_module(module: str, weight: str, shard: ShardSpec) -> _Named:
    if shard.matrix is None:
        return _joined(module, weight), CheckpointTensor(_joined(module, weight), (shard.shape,))
    name, *others = (_joined(module, each) for each in shard.stored.on_disk)
    shapes = shard.stored.shapes_on_disk(shard.matrix)
    return name, CheckpointTensor(name, shapes, other_names=tuple(others))


def _decoded(path: str, weight: str, shards: tuple[ShardSpec, ...]) -> list[_Named]:
    """Each shard names the checkpoint tensor that it is read from, relative to the layer at `path`."""
    return [
        (_joined(path, str(number), weight), shard.tensor.within(path))
        for number, shard in enumerate(shards)
        if shard.tensor is not None
    ]


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))
