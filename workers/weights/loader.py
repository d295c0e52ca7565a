"""Fills a model's weights, from safetensors files or with random numbers.

Coverage is strict: a tensor that is missing, has another shape or that nothing uses is an
error that names it. A wrong model must not start.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path

import torch

from workers.layers.causal_lm import CausalLM
from workers.layers.weighted import DiskTensor
from workers.weights.files import TensorFile, open_file, tensors_by_file
from workers.weights.plan import Slot, slots, weighted_layers

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

_NAMED_AT_MOST = 5
_HEAD = "lm_head.weight"
# Of what random layers add, in terms of an embedding: of a hundred layers as much as of one vector.
_ADDED = 0.1


class WeightError(ValueError):
    """A checkpoint that does not fit the model."""


def load_weights(model: CausalLM, directory: str | Path, progress: Progress) -> None:
    """Read this rank's part of every tensor, cast to the compute dtype. Raises `WeightError`.

    Beside the weights there is never more in memory than one tensor, and the pages of one file
    that is mapped.
    """
    wanted = list(slots(model))
    places = {name: path for path, names in tensors_by_file(Path(directory)).items() for name in names}
    _check_names(model, {part.name for slot in wanted for part in slot.parts}, places)
    done = 0
    for paths, together in _by_files(wanted, places).items():
        with ExitStack() as stack:
            files = {path: stack.enter_context(open_file(path)) for path in paths}
            for slot in together:
                _fill(slot, [files[places[part.name]] for part in slot.parts])
                done += 1
                progress(done, len(wanted))
    _finish(model)


def load_dummy(model: CausalLM, progress: Progress) -> None:
    """Random weights that keep the scale of what they are applied to; the same at every start.

    Scales of norms are one, biases zero. Nothing but the device that holds them draws them.
    What a layer adds is kept small beside the embeddings, else all tokens soon look alike, and
    choose the same few experts. Not so where the head is the embedding: it would find the last
    token again, and nothing else.
    """
    wanted = list(slots(model))
    has_own_head = any(slot.name == _HEAD for slot in wanted)
    for done, slot in enumerate(wanted, start=1):
        if len(slot.source.shape) == 1:
            slot.target.fill_(0.0 if slot.name.endswith("bias") else 1.0)
        else:
            seed = zlib.crc32(f"{slot.name}:{slot.source.kept.start}".encode())
            generator = torch.Generator(slot.target.device).manual_seed(seed)
            bound = math.sqrt(3 / slot.source.shape[-1])  # a variance of 1 / inputs
            if has_own_head and slot.source.dim == 1:  # cut by its inputs: its result is added
                bound *= _ADDED / math.sqrt(slot.source.shape[0])
            slot.target.uniform_(-bound, bound, generator=generator)
        progress(done, len(wanted))
    _finish(model)


def weight_bytes(model: CausalLM) -> int:
    """Bytes of all weights on this rank, a shared one counted once."""
    weights = {
        id(weight): weight for _, layer in weighted_layers(model) for weight in layer.buffers(recurse=False)
    }
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def _by_files(wanted: list[Slot], places: Mapping[str, Path]) -> dict[tuple[Path, ...], list[Slot]]:
    """The slots that are filled from the same files: nearly always one, two where a shard ends."""
    found: dict[tuple[Path, ...], list[Slot]] = {}
    for slot in wanted:
        paths = tuple(sorted({places[part.name] for part in slot.parts}))
        found.setdefault(paths, []).append(slot)
    return found


def _fill(slot: Slot, files: list[TensorFile]) -> None:
    """Read the parts, each from its file, and put together what this rank keeps of them."""
    source = slot.source
    for part, file in zip(slot.parts, files, strict=True):
        if (shape := file.shape(part.name)) != part.shape:
            raise WeightError(
                f"{part.name} has shape {list(shape)}; the configuration asks for {list(part.shape)}"
            )
    if source.decode is None:
        slot.target.copy_(_read(files[0], slot.parts[0], source.index))
        return
    # Decoded where it is needed: packed numbers travel faster.
    whole = [slice(None)]
    parts = [_read(file, part, whole) for file, part in zip(files, slot.parts, strict=True)]
    decoded = source.decode(*(part.to(slot.target.device) for part in parts))
    slot.target.copy_(decoded[source.index])


def _read(file: TensorFile, part: DiskTensor, index: Sequence[slice]) -> torch.Tensor:
    if part.entry is None:
        return file.read(part.name, tuple(index))
    return file.read(part.name, (slice(part.entry, part.entry + 1), *index))[0]


def _check_names(model: CausalLM, wanted: set[str], places: Mapping[str, Path]) -> None:
    missing = sorted(wanted - places.keys())
    if missing:
        raise WeightError(f"the checkpoint lacks {_listed(missing)}")
    unused = sorted(places.keys() - wanted)
    unused = [name for name in unused if not any(fnmatch(name, pattern) for pattern in model.unused_on_disk)]
    if unused:
        raise WeightError(f"the model has no place for {_listed(unused)} of the checkpoint")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _finish(model: CausalLM) -> None:
    for _, layer in weighted_layers(model):
        layer.process_weights_after_loading()
