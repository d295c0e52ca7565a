"""Weights of integers with scales, as `linear_ints.h` reads them.

Scales and offsets that are integers with units stay so; others are kept in float16 where it holds all of
them exactly.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from atom_ops.native_impl import call
from atom_ops.native_impl.build import library
from atom_ops.weights import AffineInts, ChannelINT8, Integers, PackedInts

_GROUPS = (256, 128, 64, 32, 16)
"""Inputs that may share a scale; larger groups are cut into the first of these that divides them."""
_BLOCK = 256
"""The most inputs that share units."""
_FACTOR = 1024.0
"""Factor of terms in float16, whose smallest numbers are less exact."""
_ROWS_AT_ONCE = 1 << 10
_WORDS = {4: (8, 1, torch.int32), 6: (16, 3, torch.int32), 8: (2, 1, torch.int16)}
"""Bits of a code -> inputs that share words, number of these words, their dtype."""


def pack(weight: Integers) -> PackedInts | None:
    """The weight [O, I] in panels; None where no group of `_GROUPS` divides its groups."""
    if len(weight.shape) != 2:
        return None
    outputs, inputs = weight.shape
    codes = _codes(weight)
    bits = _bits(weight)
    terms, units, block = _terms(weight)
    each = inputs // terms[0].shape[1]
    group = next((size for size in _GROUPS if each % size == 0), None)
    if group is None:
        return None
    if each > group:
        terms = [part.repeat_interleave(each // group, 1) for part in terms]
    lanes = library().atom_lanes()
    size, count, of_words = _WORDS[bits]
    words = codes.new_zeros(-(-outputs // lanes), inputs // size * count, lanes, dtype=of_words)
    for first in range(0, outputs, _ROWS_AT_ONCE):
        _fill(words, _words(codes[first : first + _ROWS_AT_ONCE], bits), first // lanes)
    held = None if units is None else _panels(units, lanes)
    return PackedInts(words, _panels(terms, lanes), held, bits, group, block, (outputs, inputs))


def pack_stack(weight: AffineInts) -> PackedInts | None:
    """The weights [X, O, I] in panels; None where O is no whole number of panels, or as in `pack`."""
    experts, outputs, inputs = weight.shape
    if outputs % library().atom_lanes():
        return None
    packed = pack(weight.flattened())
    if packed is None:
        return None
    parts = (packed.words, packed.terms, packed.units)
    words, terms, units = (None if part is None else part.unflatten(0, (experts, -1)) for part in parts)
    assert words is not None and terms is not None, "every weight has them"
    return replace(packed, words=words, terms=terms, units=units, shape=(experts, outputs, inputs))


def _bits(weight: Integers) -> int:
    return weight.bits if isinstance(weight, AffineInts) else 8 if isinstance(weight, ChannelINT8) else 4


def _codes(weight: Integers) -> Tensor:
    return weight.values if isinstance(weight, ChannelINT8) else weight.codes


def _terms(weight: Integers) -> tuple[list[Tensor], list[Tensor] | None, int]:
    """Scales and offsets [O, groups], their units [O, blocks], and the inputs of a block."""
    if isinstance(weight, AffineInts) and (found := _with_units(weight)) is not None:
        return found
    if isinstance(weight, AffineInts):
        terms = weight.terms
    elif isinstance(weight, ChannelINT8):
        terms = [weight.scales.float().unsqueeze(1)]
    else:
        scales = weight.scales.float()
        terms = [scales] if weight.zeros is None else [scales, -scales * weight.zeros]
    if _fits_float16(terms, isinstance(weight, AffineInts)):
        terms = [(part * _FACTOR).half() for part in terms]
    return terms, None, 0


def _with_units(weight: AffineInts) -> tuple[list[Tensor], list[Tensor], int] | None:
    """`_terms` of integers; None where they have no units of float16."""
    every = (weight.scale_units, weight.offset_units)
    units = [part for part in every if part is not None and part.dtype == torch.float16]
    terms = [part for part in (weight.scales, weight.offsets) if part is not None]
    if len(units) < len(terms):
        return None
    block = math.gcd(_BLOCK, weight.shape[1])
    while block > weight.group and not all(_shared(part, block // weight.group) for part in units):
        block //= 2
    if block % weight.group:
        return None
    return terms, [part[:, :: block // weight.group] for part in units], block


def _shared(units_OG: Tensor, groups: int) -> bool:
    """Whether so many consecutive groups have one unit; yes for a plan of the memory."""
    by_block = units_OG.unflatten(1, (-1, groups))
    return units_OG.is_meta or bool((by_block == by_block[:, :, :1]).all())


def _fits_float16(terms: list[Tensor], of_file: bool) -> bool:
    """Whether float16 holds them; in a plan of the memory, whether a file stores them in it."""
    if terms[0].is_meta:
        return of_file
    return all(bool(((part * _FACTOR).half().float() == part * _FACTOR).all()) for part in terms)


def _words(codes_OC: Tensor, bits: int) -> Tensor:
    """The words [O, W] of some rows, see `linear_ints.h`."""
    if bits == 8:
        return codes_OC.contiguous().view(torch.int16)
    if bits == 6:
        return _words_of_six(codes_OC)
    fours = codes_OC.unflatten(1, (-1, 4))
    even = fours & 15
    odd = fours >> 4
    halves = torch.stack(
        (even[..., 0::2] | even[..., 1::2] << 4, odd[..., 0::2] | odd[..., 1::2] << 4), -2
    )  # fmt: skip
    return halves.flatten(1).contiguous().view(torch.int32)


def _words_of_six(codes_OI: Tensor) -> Tensor:
    # [O, W / 3, half, 8]: the codes of even inputs, then of odd ones.
    eight = (codes_OI.to(torch.int32) + 32).unflatten(1, (-1, 8, 2)).transpose(2, 3)
    seventh, last = eight[..., 6], eight[..., 7]
    upper = seventh & 15, last & 15, seventh >> 4 | last >> 4 << 2
    halves = [
        eight[..., 2 * word] | eight[..., 2 * word + 1] << 6 | upper[word] << 12 for word in range(3)
    ]  # fmt: skip
    words = torch.stack(halves, 2)
    return (words[..., 0] | words[..., 1] << 16).flatten(1)


def _panels(terms: list[Tensor], lanes: int) -> Tensor:
    """Tensors [O, C] side by side: [P, C, len(terms), L]."""
    outputs, columns = terms[0].shape
    panels = terms[0].new_zeros(-(-outputs // lanes), columns, len(terms), lanes)
    for number, part in enumerate(terms):
        _fill(panels[:, :, number], part, 0)
    return panels


def _fill(panels_PCL: Tensor, rows_OC: Tensor, first: int) -> None:
    """Copy rows to the panels from `first` on."""
    lanes = panels_PCL.shape[2]
    whole, left = divmod(len(rows_OC), lanes)
    panels_PCL[first : first + whole] = rows_OC[: whole * lanes].unflatten(0, (whole, lanes)).transpose(1, 2)
    if left:
        panels_PCL[first + whole, :, :left] = rows_OC[whole * lanes :].t()


def tensors(weight: PackedInts) -> tuple[Tensor, Tensor, Tensor | None]:
    """The weight's own arguments of the kernels that are pointers."""
    return weight.words, weight.terms, weight.units


def numbers(weight: PackedInts) -> tuple[int, ...]:
    """Those that are integers, from the number of outputs on."""
    outputs, inputs = weight.shape
    has_offsets = weight.terms.shape[2] > 1
    is_wide = weight.terms.dtype == torch.float32
    return outputs, inputs, weight.bits, weight.group, weight.block, has_offsets, is_wide


def multiply(x_TI: Tensor, weight: PackedInts, bias: Tensor | None, out_TO: Tensor) -> None:
    """Fill `out_TO`, which has the dtype of x or float32; x and the bias are contiguous, of one dtype."""
    rows = x_TI.shape[0]
    in_float32 = out_TO.dtype == torch.float32
    call("linear_ints", x_TI.dtype, x_TI, *tensors(weight), bias, out_TO, rows, *numbers(weight), in_float32)
