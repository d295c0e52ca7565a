"""Fills a model's weights, from safetensors files or with random numbers.

Coverage is strict: a tensor that is missing, has another shape or that nothing uses is an
error that names it. A wrong model must not start.
"""

import math
import zlib
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path

import torch

from workers.layers.causal_lm import CausalLM
from workers.weights.files import TensorFile, open_file, tensors_by_file
from workers.weights.plan import Slot, slots, weighted_layers

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

_NAMED_AT_MOST = 5


class WeightError(ValueError):
    """A checkpoint that does not fit the model."""


def load_weights(model: CausalLM, directory: str | Path, progress: Progress) -> None:
    """Read this rank's part of every tensor, cast to the compute dtype. Raises `WeightError`."""
    wanted = {slot.name: slot for slot in slots(model)}
    files = tensors_by_file(Path(directory))
    _check_names(model, wanted, files.values())
    done = 0
    for path, names in files.items():
        with open_file(path) as file:
            for name in names:
                if name in wanted:
                    _fill(wanted[name], file)
                    done += 1
                    progress(done, len(wanted))
    _finish(model)


def load_dummy(model: CausalLM, progress: Progress) -> None:
    """Random weights that keep the scale of what they are applied to; the same at every start.

    Scales of norms are one, biases zero. Nothing but the device that holds them draws them.
    """
    wanted = list(slots(model))
    for done, slot in enumerate(wanted, start=1):
        if len(slot.source.shape) == 1:
            slot.target.fill_(0.0 if slot.name.endswith("bias") else 1.0)
        else:
            seed = zlib.crc32(f"{slot.name}:{slot.source.kept.start}".encode())
            generator = torch.Generator(slot.target.device).manual_seed(seed)
            bound = math.sqrt(3 / slot.source.shape[-1])  # a variance of 1 / inputs
            slot.target.uniform_(-bound, bound, generator=generator)
        progress(done, len(wanted))
    _finish(model)


def weight_bytes(model: CausalLM) -> int:
    """Bytes of all weights on this rank, a shared one counted once."""
    weights = {
        id(weight): weight
        for _, layer in weighted_layers(model)
        for weight in (layer.get_buffer("weight"), getattr(layer, "bias", None))
        if weight is not None
    }
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def _fill(slot: Slot, file: TensorFile) -> None:
    shape = file.shape(slot.name)
    if not slot.fits(shape):
        raise WeightError(
            f"{slot.name} has shape {list(shape)}; the configuration asks for {list(slot.source.shape)}"
        )
    slot.target.copy_(file.read(slot.name, slot.index))


def _check_names(model: CausalLM, wanted: Iterable[str], present: Iterable[Iterable[str]]) -> None:
    found = {name for names in present for name in names}
    missing = sorted(set(wanted) - found)
    if missing:
        raise WeightError(f"the checkpoint lacks {_listed(missing)}")
    unused = sorted(found - set(wanted))
    unused = [name for name in unused if not any(fnmatch(name, pattern) for pattern in model.unused_on_disk)]
    if unused:
        raise WeightError(f"the model has no place for {_listed(unused)} of the checkpoint")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _finish(model: CausalLM) -> None:
    for _, layer in weighted_layers(model):
        layer.finish_loading()
