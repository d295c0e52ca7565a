"""MXFP4 and INT4 in the layout of the Triton kernels (`atom_ops.triton_impl.quantized.four_bit`)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.weights.group_int4 import GroupINT4
from atom_ops.weights.mxfp4 import MXFP4

COLUMNS = 128
"""Columns of a chunk: a row is padded to a whole number of chunks."""
_QUARTERS = 4
_WORDS = 32
_SCALE_BIAS = 126
"""Is added to the exponents of MXFP4: the kernels decode 2^-126 times a number."""
_LARGEST_EXPONENT = 128
"""Above it the kernels' scale would be infinite in bfloat16: numbers of 4 to 12."""
_PACKED_AT_ONCE = 1 << 25


@dataclass(frozen=True, slots=True)
class FourBitWords:
    """MXFP4 or INT4 in 16-bit words of four codes. Activations are not rounded."""

    words: Tensor
    """int16 [..., O, 32 * ceil(I / 128)]."""
    scales: Tensor
    """INT4: floats [..., O, I / G]; MXFP4: int32 [..., O, 4 * ceil(I / 512)], a byte for each group of 32."""
    zeros: Tensor | None
    """INT4: uint8 [..., O, I / G]; None: 8."""
    inputs: int
    """I."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.words.shape[:-1], self.inputs)

    @property
    def row_unit(self) -> int:
        """The number of rows that share scales."""
        return 1

    @property
    def group(self) -> int:
        """INT4: the number of inputs that share a scale; MXFP4: 0."""
        return self.inputs // self.scales.shape[-1] if self.scales.is_floating_point() else 0

    def expert(self, number: int) -> "FourBitWords":
        return self._of(slice(number, number + 1), True)

    def rows(self, start: int, stop: int) -> "FourBitWords":
        """Rows of [O, I]."""
        return self._of(slice(start, stop), False)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers, rounded to `dtype`."""
        codes = _codes_of(self.words, self.group == 0).narrow(-1, 0, self.inputs)
        pairs = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        if self.group:
            return GroupINT4(pairs, self.scales, self.zeros).dequantized(dtype)
        exponents = self.scales.contiguous().view(torch.uint8).narrow(-1, 0, self.inputs // _WORDS)
        return MXFP4(pairs, exponents - _SCALE_BIAS).dequantized(dtype)

    def _of(self, part: slice, single: bool) -> "FourBitWords":
        def cut(tensor: Tensor) -> Tensor:
            return tensor[part].squeeze(0) if single else tensor[part]

        zeros = None if self.zeros is None else cut(self.zeros)
        return replace(self, words=cut(self.words), scales=cut(self.scales), zeros=zeros)


def pack_words(weight: GroupINT4 | MXFP4) -> FourBitWords | None:
    """The weight [X, O, I] in words; None where the kernels cannot read it.

    That is INT4 with groups of other sizes than 32, 64, multiples of 128 and whole rows, or MXFP4 with a
    scale above 2 or one that is NaN.
    """
    inputs = weight.shape[-1]
    if isinstance(weight, GroupINT4):
        if weight.group not in (32, 64, inputs) and weight.group % COLUMNS:
            return None
        return FourBitWords(_words_of(weight.codes, False), weight.scales, weight.zeros, inputs)
    if not weight.scales.is_meta and int(weight.scales.max()) > _LARGEST_EXPONENT:
        return None
    groups = -(-inputs // (4 * COLUMNS)) * 4 * _QUARTERS
    scales = functional.pad(weight.scales + _SCALE_BIAS, (0, groups - weight.scales.shape[-1]))
    return FourBitWords(_words_of(weight.blocks, True), scales.view(torch.int32), None, inputs)


def _words_of(pairs: Tensor, is_e2m1: bool) -> Tensor:
    """Words from bytes of two codes [X, O, I / 2], a few rows at a time."""
    rows = pairs.flatten(0, -2)
    bytes_ = pairs.shape[-1]
    chunks = -(-2 * bytes_ // COLUMNS)
    padding = chunks * COLUMNS // 2 - bytes_
    words = torch.empty(len(rows), chunks * _WORDS, dtype=torch.int16, device=pairs.device)
    tables = _tables(is_e2m1, pairs.device)
    each = max(_PACKED_AT_ONCE // (chunks * COLUMNS), 1)
    for part, into in zip(rows.split(each), words.view(torch.int32).split(each), strict=True):
        padded = functional.pad(part, (0, padding)) if padding else part
        quarters = padded.unflatten(-1, (chunks, _QUARTERS, _WORDS // 2)).unbind(-2)
        a, b, c, d = (table[quarter.long()] for table, quarter in zip(tables, quarters, strict=True))
        torch.bitwise_or(a | b, c | d, out=into.unflatten(-1, (chunks, _WORDS // 2)))
    return words.view(*pairs.shape[:-1], -1)


def _tables(is_e2m1: bool, device: torch.device) -> Tensor:
    """For each quarter of a chunk and each byte, the bits of its two codes in two words: int32 [4, 256]."""
    code = torch.arange(16, dtype=torch.int32)
    if is_e2m1:
        first = [code >> 3 << 15 - at | (code & 7) << 6 - at for at in (0, 3, 6)]
        of_codes = torch.stack((*first, code >> 3 << 14 | (code >> 1 & 3) << 10 | (code & 1) << 13))
    else:
        of_codes = torch.stack([code << 4 * quarter for quarter in range(_QUARTERS)])
    byte = torch.arange(256)
    return (of_codes[:, byte & 15] | of_codes[:, byte >> 4] << 16).to(device)


def _codes_of(words: Tensor, is_e2m1: bool) -> Tensor:
    """The codes, int32 [..., padded I]."""
    bits = words.int()
    if is_e2m1:
        quarters = [bits >> 15 - at & 1 for at in (0, 3, 6, 1)]
        magnitudes = [bits >> 6 - at & 7 for at in (0, 3, 6)]
        magnitudes.append((bits >> 10 & 3) << 1 | bits >> 13 & 1)
        quarters = [sign << 3 | magnitude for sign, magnitude in zip(quarters, magnitudes, strict=True)]
    else:
        quarters = [bits >> 4 * quarter & 15 for quarter in range(_QUARTERS)]
    split = [quarter.unflatten(-1, (-1, _WORDS)) for quarter in quarters]
    return torch.stack(split, -2).flatten(-3)
