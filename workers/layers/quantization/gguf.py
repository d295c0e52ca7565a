"""Matrices of GGUF files, as `workers.weights.gguf` converts them: integers with scales, perhaps offsets.

weight_codes    [O, I] int8, or [O, I / 2] uint8 of 4-bit codes    see `AffineInts`
weight_scales   [O, I / G] float32
weight_offsets  [O, I / G] float32

The embedding and the LM head may have them too.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from atom_ops import AffineInts
from workers.layers.quantization.fills import constant_fill, fill_bytes, fill_codes
from workers.layers.quantization.rules import Rule, Rules, exact, patterns
from workers.layers.quantization.scheme import PLAIN, Scheme, StoredTensor

_CODES_STD = {4: 4.6, 8: 40.0}
_FORMAT = re.compile(r"int(4|8)_(16|32)(_offsets)?")


def rules(stated: Mapping[str, Any]) -> Rules:
    """`modules` has the paths of each format's modules; others are plain."""
    modules = stated.get("modules")
    if not isinstance(modules, dict):
        raise ValueError(f"modules that are no object: {modules!r:.80}")
    return Rules(
        PLAIN,
        [Rule(path, _scheme(name), exact) for name in modules for path in patterns(modules, name)],
        with_vocabulary=True,
    )


def _scheme(name: str) -> Scheme:
    if (found := _FORMAT.fullmatch(name)) is None:
        raise ValueError(f"the format {name!r:.40}")
    return affine_ints(int(found[1]), int(found[2]), found[3] is not None)


@cache
def affine_ints(bits: int, group: int, with_offsets: bool) -> Scheme:
    """Integers of 4 or 8 bits, and a scale for each `group` inputs."""
    std, unit = _CODES_STD[bits], (1, group)
    if bits == 4:
        codes = StoredTensor("_codes", (1, 2), (torch.uint8,), fill_bytes, torch.uint8)
    else:
        codes = StoredTensor("_codes", (1, 1), (torch.int8,), fill_codes(std), torch.int8)
    scales = StoredTensor("_scales", unit, (torch.float32,), constant_fill(std), torch.float32)
    offsets = StoredTensor("_offsets", unit, (torch.float32,), _no_offsets, torch.float32)
    added = " and an offset" if with_offsets else ""
    return Scheme(
        f"INT{bits} with a scale{added} for each {group} inputs",
        unit,
        (codes, scales, offsets) if with_offsets else (codes, scales),
        AffineInts,
        ragged=False,
    )


def _no_offsets(offsets: torch.Tensor, std: float, generator: torch.Generator) -> None:
    offsets.zero_()
