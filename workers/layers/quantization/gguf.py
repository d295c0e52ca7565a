"""Matrices of GGUF files, as `workers.weights.gguf` converts them: integers with scales, perhaps offsets.

weight_codes         [O, I] int8, or [O, I / 2] uint8 of 4-bit codes    see `AffineInts`
weight_scales        [O, I / G] float32, or int8 with units
weight_offsets       [O, I / G] the same
weight_scale_units   [O, I / G] float16
weight_offset_units  [O, I / G] float16

The embedding and the LM head may have them too. Experts may have MXFP4, in two tensors as elsewhere, or as
GPT-OSS stacks them.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from atom_ops import AffineInts
from workers.layers.quantization.fills import constant_fill, fill_bytes, fill_codes
from workers.layers.quantization.mxfp4 import mxfp4
from workers.layers.quantization.mxfp4 import rules as mxfp4_rules
from workers.layers.quantization.rules import Rule, Rules, glob, patterns
from workers.layers.quantization.scheme import PLAIN, Scheme, StoredTensor

_CODES_STD = {4: 4.6, 6: 12.0, 8: 40.0}
_INTEGER = 32
"""All integer scales of random weights."""
_MXFP4 = "mxfp4"
_STACKS = (".experts.gate_up_proj", ".experts.down_proj")
_FORMAT = re.compile(r"int(4|6|8)_(16|32)(_offsets)?(_units)?")


def rules(stated: Mapping[str, Any]) -> Rules:
    """`modules` has the paths of each format's modules; others are plain."""
    modules = stated.get("modules")
    if not isinstance(modules, dict):
        raise ValueError(f"modules that are no object: {modules!r:.80}")
    return Rules(
        PLAIN,
        [Rule(path, _scheme(name, path), glob) for name in modules for path in patterns(modules, name)],
        with_vocabulary=True,
    )


def _scheme(name: str, path: str) -> Scheme:
    if name == _MXFP4:
        return mxfp4_rules({}).default if path.endswith(_STACKS) else mxfp4("weight_packed")
    if (found := _FORMAT.fullmatch(name)) is None:
        raise ValueError(f"the format {name!r:.40}")
    return affine_ints(int(found[1]), int(found[2]), found[3] is not None, found[4] is not None)


@cache
def affine_ints(bits: int, group: int, with_offsets: bool, with_units: bool) -> Scheme:
    """Integers of 4, 6 or 8 bits, and a scale for each `group` inputs; `with_units`: an integer of 8 bits."""
    std = _CODES_STD[bits]
    if bits == 4:
        codes = StoredTensor("_codes", (1, 2), (torch.uint8,), fill_bytes, torch.uint8)
    else:
        codes = StoredTensor("_codes", (1, 1), (torch.int8,), fill_codes(std), torch.int8)
    dtype = torch.int8 if with_units else torch.float32
    terms = {"scales": (dtype, _integers if with_units else constant_fill(std))}
    if with_offsets:
        terms["offsets"] = (dtype, _zeros)
    if with_units:
        terms["scale_units"] = (torch.float16, constant_fill(std * _INTEGER))
    if with_units and with_offsets:
        terms["offset_units"] = (torch.float16, _zeros)

    def weight(codes: Tensor, *parts: Tensor) -> AffineInts:
        return AffineInts(codes, **dict(zip(terms, parts, strict=True)), narrow=bits == 6)

    unit = (1, group)
    stored = (StoredTensor(f"_{part}", unit, (of,), fill, of) for part, (of, fill) in terms.items())
    added = " and an offset" if with_offsets else ""
    size = " of 8 bits" if with_units else ""
    title = f"INT{bits} with a scale{added}{size} for each {group} inputs"
    return Scheme(title, unit, (codes, *stored), weight, ragged=False, mixes=True)


def _integers(scales: Tensor, std: float, generator: torch.Generator) -> None:
    scales.fill_(_INTEGER)


def _zeros(terms: Tensor, std: float, generator: torch.Generator) -> None:
    terms.zero_()
