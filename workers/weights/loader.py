"""Loads a model's weights from safetensors files, or fills them with random numbers.

Loading is strict: a tensor that is missing, unused or of another shape raises `WeightError` with its
name, so that a wrong model never starts.
"""

import ctypes
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path

import torch

from workers.layers.causal_lm import CausalLM
from workers.layers.weighted import CheckpointTensor, WeightedLayer
from workers.weights.files import TensorFile, open_file, tensors_by_file
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


def load_weights(model: CausalLM, directory: str | Path, progress: Progress) -> None:
    """Load this rank's shard of every tensor, cast to the compute dtype. Raises `WeightError`.

    Memory needed beside the weights: one tensor of the checkpoint, one layer where
    `process_weights_after_loading` copies it, up to `_TRIM_BYTES` that the allocator has not returned
    yet, and the mapped pages of one file.
    """
    targets = list(load_targets(model))
    file_of = {name: path for path, names in tensors_by_file(Path(directory)).items() for name in names}
    _check_names(model, {tensor.name for target in targets for tensor in target.tensors}, file_of)
    loading = _Loading(model, targets, progress)
    for paths, group in _by_files(targets, file_of).items():
        with ExitStack() as stack:
            files = {path: stack.enter_context(open_file(path)) for path in paths}
            for target in group:
                _load(target, [files[file_of[tensor.name]] for tensor in target.tensors])
                loading.loaded(target)
    loading.finish()


def load_dummy(model: CausalLM, progress: Progress) -> None:
    """Fill the weights with random numbers that keep the scale of activations; equal at every start.

    Norm weights are one, biases zero. The numbers are generated on the device that holds the weights.
    Each layer's output is small beside the embeddings; otherwise the hidden states of all tokens soon
    are similar and are routed to the same few experts. With tied embeddings it is not scaled down,
    because the LM head would then predict the last token again.
    """
    targets = list(load_targets(model))
    has_lm_head = any(target.name == _LM_HEAD for target in targets)
    loading = _Loading(model, targets, progress)
    for target in targets:
        _fill_randomly(target, has_lm_head)
        loading.loaded(target)
    loading.finish()


def _fill_randomly(target: LoadTarget, has_lm_head: bool) -> None:
    shape = target.shard.shape
    if len(shape) == 1:
        target.buffer.fill_(0.0 if target.name.endswith("bias") else 1.0)
        return
    seed = zlib.crc32(f"{target.name}:{target.shard.kept.start}".encode())
    generator = torch.Generator(target.buffer.device).manual_seed(seed)
    bound = math.sqrt(3 / shape[-1])  # a variance of 1 / inputs
    if has_lm_head and target.shard.dim == 1:  # row parallel: the output is added to the residual stream
        bound *= _RESIDUAL_SCALE / math.sqrt(shape[0])
    target.buffer.uniform_(-bound, bound, generator=generator)


def weight_bytes(model: CausalLM) -> int:
    """Bytes of all weights on this rank; a tied weight counts once."""
    weights = {
        id(weight): weight for _, layer in weighted_layers(model) for weight in layer.buffers(recurse=False)
    }
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def _by_files(
    targets: list[LoadTarget], file_of: Mapping[str, Path]
) -> dict[tuple[Path, ...], list[LoadTarget]]:
    """Targets grouped by the files they are read from: nearly always one, two at a file's end."""
    groups: dict[tuple[Path, ...], list[LoadTarget]] = {}
    for target in targets:
        paths = tuple(sorted({file_of[tensor.name] for tensor in target.tensors}))
        groups.setdefault(paths, []).append(target)
    return groups


def _load(target: LoadTarget, files: list[TensorFile]) -> None:
    """Read the target's tensors, each from its file, and copy the kept range into the buffer."""
    shard = target.shard
    for tensor, file in zip(target.tensors, files, strict=True):
        if (shape := file.shape(tensor.name)) != tensor.shape:
            raise WeightError(
                f"{tensor.name} has shape {list(shape)}; the configuration needs {list(tensor.shape)}"
            )
    if not shard.kept.size:  # of another rank
        return
    if shard.decode is None:
        target.buffer.copy_(_read(files[0], target.tensors[0], shard.index))
        return
    # Decoded on the device: the quantized form is smaller to copy.
    whole = [slice(None)]
    parts = [_read(file, tensor, whole) for file, tensor in zip(files, target.tensors, strict=True)]
    decoded = shard.decode(*(part.to(target.buffer.device) for part in parts))
    target.buffer.copy_(decoded[shard.index])


def _read(file: TensorFile, tensor: CheckpointTensor, index: Sequence[slice]) -> torch.Tensor:
    if tensor.entry is None:
        return file.read(tensor.name, tuple(index))
    return file.read(tensor.name, (slice(tensor.entry, tensor.entry + 1), *index))[0]


def _check_names(model: CausalLM, needed: set[str], file_of: Mapping[str, Path]) -> None:
    missing = sorted(needed - file_of.keys())
    if missing:
        raise WeightError(f"the checkpoint lacks {_listed(missing)}")
    unused = sorted(file_of.keys() - needed)
    unused = [name for name in unused if not any(fnmatch(name, pattern) for pattern in model.unused_on_disk)]
    if unused:
        raise WeightError(f"the checkpoint holds tensors that the model does not use: {_listed(unused)}")


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED_NAMES
    return ", ".join(names[:_MAX_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")


class _Loading:
    """Processes each layer's weights as soon as they are loaded, so that only one layer is held twice."""

    def __init__(self, model: CausalLM, targets: list[LoadTarget], progress: Progress):
        self._model = model
        self._progress = progress
        self._total = len(targets)
        self._done = 0
        self._remaining = Counter(target.layer for target in targets)
        self._untrimmed_bytes = 0

    def loaded(self, target: LoadTarget) -> None:
        """Called after each target."""
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
        on_cpu = (weight.nbytes for weight in layer.buffers(recurse=False) if weight.device.type == "cpu")
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
