"""Loads a model's weights from safetensors files or a stream, or fills them with random numbers.

Loading is strict: a tensor that is missing, unused or of another shape raises `WeightError` with its
name, so that a wrong model never starts.
"""

import ctypes
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import torch

from atom.shared.utils.logger import get_logger
from atom_ops import tensors_of
from workers.layers.causal_lm import WeightedModel
from workers.layers.moe.moe import Experts
from workers.layers.quantization.scheme import PLAIN
from workers.layers.weighted import CheckpointTensor, ReadDecoded, ReadPacked, ReadRange, WeightedLayer
from workers.weights.cache_scales import is_cache_scale
from workers.weights.files import (
    TensorInMemory,
    TensorPlace,
    TensorSource,
    model_name,
    tensor_places,
    tensors_in_order,
)
from workers.weights.plan import LoadTarget, load_targets, weighted_layers

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

_MAX_LISTED_NAMES = 5
_LM_HEAD = "lm_head.weight"
# Scale of a random layer's output in the residual stream: a hundred layers add as much as one embedding.
_RESIDUAL_SCALE = 0.1
# Bytes of processed weights after which freed memory is returned to the system.
_TRIM_BYTES = 64 << 20


class WeightError(ValueError):
    """A checkpoint that does not fit the model."""


def load_directory(model: WeightedModel, directory: str | Path, progress: Progress) -> None:
    """Load this rank's shard of every tensor of the safetensors files. Raises `WeightError`.

    Memory needed besides the weights: one tensor of the checkpoint, one layer where
    `process_weights_after_loading` copies it, up to `_TRIM_BYTES` that the allocator has not returned
    yet, and the mapped pages of one file.
    """
    places = tensor_places(Path(directory), model.beginnings_on_disk)
    targets = list(load_targets(model))
    biases = _biases_without_effect(targets, places)
    _check_names(model, targets, places.keys() - biases)
    for pattern in model.unused_on_disk:
        if unused := sum(fnmatch(name, pattern) for name in places):
            get_logger().info("tensors in the checkpoint that are not loaded: %d, as %s", unused, pattern)
    if scales := [name for name in places if is_cache_scale(name)]:
        get_logger().info(
            "scales of the KV cache in the checkpoint (%d, as %s) are not applied: with --kv-cache-dtype fp8 "
            "each token has scales of its own", len(scales), scales[0],
        )  # fmt: skip
    kept = (target.tensor for target in targets if not target.shard.elsewhere)
    needed = dict.fromkeys(name for tensor in kept for name in tensor.names if name in places)
    by_name = _by_name(targets)
    for name, source in tensors_in_order(places, needed):  # all headers, before gigabytes are read
        for target in by_name[name]:
            _check(name, target, source)
    load_weights(model, tensors_in_order(places, needed), progress)


def load_weights(
    model: WeightedModel, tensors: Iterable[tuple[str, torch.Tensor | TensorSource]], progress: Progress
) -> None:
    """Load this rank's shard of every tensor that arrives, cast to the compute dtype, in any order.

    `tensors` are (name in the checkpoint, tensor), as another engine or a converter sends them; a
    tensor is not referenced after it was copied. Those that other ranks keep may be left out or not.
    Raises `WeightError` for one that is missing, unused, repeated, or of another shape or dtype.
    """
    targets = list(load_targets(model))
    by_name = _by_name(targets)
    modules = _modules(targets)
    loading = _Loading(model, targets, progress)
    done: set[str] = set()
    for stored, tensor in tensors:
        name = model_name(stored, model.beginnings_on_disk)
        source = TensorInMemory(tensor) if isinstance(tensor, torch.Tensor) else tensor
        if name not in by_name:
            if not (_is_bias_of(modules, name) and _is_zero(source)):
                _check_unused(model, [name])
        elif name in done:
            raise WeightError(f"{name} arrived twice")
        _check_alone(by_name.get(name, ()), name, done)
        done.add(name)
        for target in by_name.get(name, ()):
            _load(name, target, source)
            loading.loaded(target)
    _check_missing(targets, done)
    loading.finish()


def load_dummy(model: WeightedModel, progress: Progress) -> None:
    """Fill the weights with random numbers that keep the scale of activations; equal at every start.

    Norm weights are one, biases zero. The numbers are generated on the device that holds the weights.
    Each layer's output is small compared with the embeddings; otherwise the hidden states of all tokens soon
    are similar and are routed to the same few experts. With tied embeddings it is not scaled down,
    because the LM head would then predict the last token again.
    """
    targets = list(load_targets(model))
    has_lm_head = any(target.name.endswith(_LM_HEAD) for target in targets)
    loading = _Loading(model, targets, progress)
    generator_on = cache(torch.Generator)  # one for all of thousands of tensors
    for target in targets:
        if target.shard.elsewhere:  # its layer may be processed already
            continue
        _fill_randomly(target, has_lm_head, generator_on(target.device))
        loading.loaded(target)
    loading.finish()


def _fill_randomly(target: LoadTarget, has_lm_head: bool, generator: torch.Generator) -> None:
    buffer = target.buffer
    shard = target.shard
    shape = shard.matrix or shard.shape
    if len(shape) == 1:
        buffer.fill_(0.0 if target.name.endswith("bias") else 1.0)
        return
    generator.manual_seed(zlib.crc32(f"{target.name}:{shard.kept.start}".encode()))
    std = math.sqrt(1 / shape[-1])
    if has_lm_head and shard.dim == 1:  # row parallel: the output is added to the residual stream
        std *= _RESIDUAL_SCALE / math.sqrt(shape[0])
    shard.stored.fill(buffer, std, generator)
    if target.layer.quantizes(target.weight):
        target.store(buffer)


def weight_bytes(model: WeightedModel) -> int:
    """Bytes of all weights on this rank, as they are held; a tied weight counts once."""
    weights = {id(tensor): tensor for _, layer in weighted_layers(model) for tensor in layer.held_tensors()}
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


def describe_schemes(model: WeightedModel) -> Iterator[str]:
    """A line for each scheme of the model, with the number of its layers; none if all are plain."""
    counts: dict[str, Counter[str]] = {}
    for _, layer in weighted_layers(model):
        for scheme in set(layer.schemes.values()):
            kind = "of experts" if isinstance(layer, Experts) else "linear"
            counts.setdefault(scheme.name, Counter())[kind] += 1
    if counts.keys() <= {PLAIN.name}:
        return
    for name, kinds in sorted(counts.items()):
        layers = " and ".join(f"{number} {kind}" for kind, number in sorted(kinds.items(), reverse=True))
        yield f"layers in {name}: {layers}"
    if plain := sum(layer.dequantizes for _, layer in weighted_layers(model)):
        yield f"layers that are dequantized when they are loaded: {plain}"


def describe_weights(model: WeightedModel) -> str:
    """Number and size of the weights of each type on this rank, for the log."""
    return ", ".join(
        f"{len(each)} {name} ({sum(each) / (1 << 20):.1f} MiB)" for name, each in weight_sizes(model).items()
    )


def weight_sizes(model: WeightedModel) -> dict[str, list[int]]:
    """Bytes of each weight on this rank by its type, sorted; a plain tensor has type "plain"."""
    weights = {id(weight): weight for _, layer in weighted_layers(model) for weight in layer.held_weights()}
    sizes: dict[str, list[int]] = {}
    for weight in weights.values():
        name = "plain" if isinstance(weight, torch.Tensor) else type(weight).__name__
        sizes.setdefault(name, []).append(
            sum(part.numel() * part.element_size() for part in tensors_of(weight))
        )
    return dict(sorted(sizes.items()))


def _by_name(targets: Iterable[LoadTarget]) -> dict[str, list[LoadTarget]]:
    """The targets that are read from each tensor of the checkpoint, under each of its possible names."""
    found: dict[str, list[LoadTarget]] = {}
    for target in targets:
        for name in target.tensor.names:
            found.setdefault(name, []).append(target)
    return found


def _biases_without_effect(targets: Sequence[LoadTarget], places: Mapping[str, TensorPlace]) -> set[str]:
    """Biases that the model does not have, and that are zero: old quantizers store one for every layer."""
    modules = _modules(targets)
    known = {name for target in targets for name in target.tensor.names}
    extra = [name for name in places if name not in known and _is_bias_of(modules, name)]
    return {name for name, source in tensors_in_order(places, extra) if _is_zero(source)}


def _modules(targets: Iterable[LoadTarget]) -> set[str]:
    """The checkpoint's modules that the model reads tensors of."""
    return {name.rpartition(".")[0] for target in targets for name in target.tensor.names}


def _is_bias_of(modules: Set[str], name: str) -> bool:
    module, _, last = name.rpartition(".")
    return last == "bias" and module in modules


def _is_zero(source: TensorSource) -> bool:
    return not source.read(()).any()


def _check(name: str, target: LoadTarget, source: TensorSource) -> None:
    """Raise WeightError if the tensor has another shape or dtype than the target needs."""
    shard = target.shard
    tensor = target.tensor.named(name)
    if source.shape not in tensor.shapes:
        wanted = " or ".join(str(list(shape)) for shape in tensor.shapes)
        raise WeightError(f"{name} has shape {list(source.shape)}; the configuration needs {wanted}")
    if source.dtype not in shard.stored.dtypes:
        wanted = " or ".join(_name(dtype) for dtype in shard.stored.dtypes)
        raise WeightError(
            f"{name} has dtype {_name(source.dtype)}; the configuration needs {wanted}: does "
            "quantization_config of config.json name the format of this tensor?"
        )


def _load(name: str, target: LoadTarget, source: TensorSource) -> None:
    """Copy the kept range of the tensor into the buffer."""
    _check(name, target, source)
    shard = target.shard
    tensor = target.tensor.named(name)
    if shard.elsewhere:
        return
    match tensor.reading or shard.reading:
        case ReadRange():
            target.store(_read(source, tensor, shard.index))
        case ReadPacked(index, unpack):
            target.store(unpack(_read(source, tensor, index).to(target.device)))
        case ReadDecoded(decode):
            # Decoded on the device: the quantized form is smaller to copy.
            whole = _read(source, tensor, [slice(None)] if source.shape else []).to(target.device)
            target.store(decode(whole)[shard.index])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read(source: TensorSource, tensor: CheckpointTensor, index: Sequence[slice]) -> torch.Tensor:
    if tensor.first_row:
        index = [_moved(index[0], tensor.first_row), *index[1:]]
    if tensor.entry is None:
        return source.read(tuple(index))
    return source.read((slice(tensor.entry, tensor.entry + 1), *index))[0]


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _check_names(model: WeightedModel, targets: Sequence[LoadTarget], held: Set[str]) -> None:
    _check_missing(targets, held)
    for target in targets:
        present = [name for name in target.tensor.names if name in held]
        _check_alone([target], present[0] if present else target.tensor.name, held)
    _check_unused(model, held - {name for target in targets for name in target.tensor.names})


def _check_missing(targets: Iterable[LoadTarget], held: Set[str]) -> None:
    missing = {
        target.tensor.name
        for target in targets
        if not target.shard.elsewhere and held.isdisjoint(target.tensor.names)
    }
    if missing:
        raise WeightError(f"the checkpoint lacks {_listed(sorted(missing))}")


def _check_alone(targets: Iterable[LoadTarget], name: str, held: Set[str]) -> None:
    """Raise WeightError if a tensor is held under a second name."""
    for target in targets:
        for other in target.tensor.names:
            if other != name and other in held:
                raise WeightError(f"the checkpoint holds both {name} and {other}, which are the same tensor")


def _check_unused(model: WeightedModel, names: Iterable[str]) -> None:
    patterns = model.unused_on_disk
    unused = [
        name
        for name in sorted(names)
        if not is_cache_scale(name) and not any(fnmatch(name, pattern) for pattern in patterns)
    ]
    if unused:
        of_schemes = {name for _, layer in weighted_layers(model) for name in layer.unused_on_disk}
        unused = [name for name in unused if name.rpartition(".")[2] not in of_schemes]
    if unused:
        raise WeightError(f"the checkpoint holds tensors that the model does not use: {_listed(unused)}")


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED_NAMES
    return ", ".join(names[:_MAX_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")


class _Loading:
    """Processes each layer's weights as soon as they are loaded, so that only one layer is held twice."""

    def __init__(self, model: WeightedModel, targets: list[LoadTarget], progress: Progress):
        self._model = model
        self._progress = progress
        here = [target for target in targets if not target.shard.elsewhere]  # others may not arrive
        self._total = len(here)
        self._done = 0
        self._remaining = Counter(target.layer for target in here)
        self._untrimmed_bytes = 0

    def loaded(self, target: LoadTarget) -> None:
        """Count a target, and process its layer if it was the last; called after each target."""
        if target.shard.elsewhere:
            return
        self._remaining[target.layer] -= 1
        if not self._remaining[target.layer]:
            self._process(target.layer)
        self._done += 1
        self._progress(self._done, self._total)

    def finish(self) -> None:
        """Process the layers that load nothing: an LM head tied to the embedding."""
        for _, layer in weighted_layers(self._model):
            if layer not in self._remaining:
                self._process(layer)
        _return_freed_memory()

    def _process(self, layer: WeightedLayer) -> None:
        on_cpu = (weight.nbytes for weight in layer.held_tensors() if weight.device.type == "cpu")
        self._untrimmed_bytes += sum(on_cpu)
        layer.process_weights_after_loading()
        if self._untrimmed_bytes >= _TRIM_BYTES:
            _return_freed_memory()
            self._untrimmed_bytes = 0


def _return_freed_memory() -> None:
    """Have glibc return freed memory to the system; otherwise it keeps a fifth of the replaced weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
