"""Weights of integers with scales, as `linear_ints.h` reads them.

Scales and offsets are kept in float16 where it holds them exactly, and those of `AffineInts` wherever it has
their range: that costs a 4-bit matrix 2e-4 of its result, and saves a sixth of its memory.
"""

import torch
from torch import Tensor

from atom_ops.native_impl import call
from atom_ops.native_impl.build import library
from atom_ops.weights import AffineInts, ChannelINT8, GroupINT4, Integers, PackedInts

_GROUPS = (256, 128, 64, 32, 16)
"""Inputs that may share a scale; larger groups are cut into the first of these that divides them."""
_FACTOR = 1024.0
"""Of terms in float16, whose smallest numbers are less exact."""
_LARGEST, _SMALLEST = 60.0, 1e-4
"""Between them is the largest term of a matrix whose terms are rounded."""
_ZERO = 8
"""The stored 4-bit code of 0; kernels read codes with offsets as they are stored."""
_ROWS_AT_ONCE = 1 << 10


def pack(weight: Integers) -> PackedInts | None:
    """The weight [O, I] in panels; None where no group of `_GROUPS` divides its groups."""
    if len(weight.shape) != 2:
        return None
    (outputs, inputs), (codes, scales, offsets) = weight.shape, _parts(weight)
    each = inputs // scales.shape[1]
    group = next((size for size in _GROUPS if each % size == 0), None)
    if group is None:
        return None
    terms = [part.float() for part in (scales, offsets) if part is not None]
    dtype = _dtype_of(terms, isinstance(weight, AffineInts))
    if dtype == torch.float16:
        terms = [part * _FACTOR for part in terms]
    if each > group:
        terms = [part.repeat_interleave(each // group, 1) for part in terms]
    bits = 8 if codes.dtype == torch.int8 else 4
    lanes = library().atom_lanes()
    panels = -(-outputs // lanes)
    size, of_words = (2, torch.int16) if bits == 8 else (8, torch.int32)
    words = codes.new_zeros(panels, inputs // size, lanes, dtype=of_words)
    held = codes.new_zeros(panels, inputs // group, len(terms), lanes, dtype=dtype)
    for first in range(0, outputs, _ROWS_AT_ONCE):
        _fill(words, _words(codes[first : first + _ROWS_AT_ONCE]), first // lanes)
    for number, part in enumerate(terms):
        _fill(held[:, :, number], part.to(dtype), 0)
    return PackedInts(words, held, bits, group, (outputs, inputs))


def _dtype_of(terms: list[Tensor], may_round: bool) -> torch.dtype:
    """float16 for terms that it holds, or that may be rounded; elsewhere float32."""
    if terms[0].is_meta:
        return torch.float16 if may_round else torch.float32
    if not all(bool(((part * _FACTOR).half().float() == part * _FACTOR).all()) for part in terms):
        largest = max(float(part.abs().max()) for part in terms)
        if not (may_round and _SMALLEST < largest < _LARGEST):
            return torch.float32
    return torch.float16


def _parts(weight: Integers) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes as they are stored, scales, and offsets of 8-bit codes or of stored ones."""
    if isinstance(weight, ChannelINT8):
        return weight.values, weight.scales.unsqueeze(1), None
    scales = weight.scales.float()
    if isinstance(weight, GroupINT4):
        return weight.codes, scales, None if weight.zeros is None else -scales * weight.zeros
    if weight.offsets is None or weight.bits == 8:
        return weight.codes, scales, weight.offsets
    return weight.codes, scales, weight.offsets.float() - _ZERO * scales


def _words(codes_OC: Tensor) -> Tensor:
    """Codes in words: int16 [O, I / 2] of 8-bit codes, int32 [O, I / 8] of 4-bit ones."""
    if codes_OC.dtype == torch.int8:
        return codes_OC.contiguous().view(torch.int16)
    fours = codes_OC.unflatten(1, (-1, 4))
    even, odd = fours & 15, fours >> 4
    halves = torch.stack(
        (even[..., 0::2] | even[..., 1::2] << 4, odd[..., 0::2] | odd[..., 1::2] << 4), -2
    )  # fmt: skip
    return halves.flatten(1).contiguous().view(torch.int32)


def _fill(panels_PCL: Tensor, rows_OC: Tensor, first: int) -> None:
    """Copy rows to the panels from `first` on."""
    lanes = panels_PCL.shape[2]
    whole, left = divmod(len(rows_OC), lanes)
    panels_PCL[first : first + whole] = rows_OC[: whole * lanes].unflatten(0, (whole, lanes)).transpose(1, 2)
    if left:
        panels_PCL[first + whole, :, :left] = rows_OC[whole * lanes :].t()


def multiply(x_TI: Tensor, weight: PackedInts, bias: Tensor | None, out_TO: Tensor) -> None:
    """Fill `out_TO`, which has the dtype of x or float32; x and the bias are contiguous, of one dtype."""
    outputs, inputs = weight.shape
    call(
        "linear_ints", x_TI.dtype, x_TI, weight.words, weight.terms, bias, out_TO, len(x_TI), outputs, inputs,
        out_TO.dtype == torch.float32, weight.bits, weight.group, weight.terms.shape[2] > 1,
        weight.terms.dtype == torch.float32,
    )  # fmt: skip
