"""The quantized blocks of GGUF files as `AffineInts`: integers, and a scale and an offset for each group.

A row of a tensor is a sequence of blocks, of 32 or 256 inputs:

    Q4_0   scale | 16 bytes                          4 bits, less 8
    Q4_1   scale, offset | 16 bytes
    Q5_0   scale | 4 bytes of fifth bits | 16 bytes  5 bits, less 16
    Q5_1   scale, offset | 4 | 16 bytes
    Q8_0   scale | 32 bytes                          signed
    Q2_K   16 scales and minima of 4 bits | 64 bytes | unit of scales, of minima
    Q3_K   32 bytes of third bits | 64 bytes | 12 bytes: 16 scales of 6 bits, less 32 | unit
    Q4_K   units of scales and minima | 12 bytes: 8 scales and 8 minima of 6 bits | 128 bytes
    Q5_K   the same | 32 bytes of fifth bits | 128 bytes
    Q6_K   128 bytes | 64 bytes of upper bits | 16 scales | unit       6 bits, less 32
    IQ4_NL scale | 16 bytes                          4 bits, the numbers of levels
    IQ4_XS unit | 2 bytes of upper bits and 4 of lower ones: 8 scales of 6 bits, less 32 | 128 bytes

Floats are float16. The layout was read from ggml's description, and is compared with the decoder of the
Python package `gguf` in the tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atom_ops import AffineInts
from atom_ops.weights.affine_ints import ZERO

Bytes = NDArray[np.uint8]
"""Bytes of each block, [blocks, bytes]."""
Numbers = NDArray[np.float32]
"""Scales or offsets, [blocks, groups]."""
Units = NDArray[np.float16]
"""Factors of integer scales or offsets, [blocks, groups]."""
_Type = gguf.GGMLQuantizationType
STORED = ("codes", "scales", "offsets", "scale_units", "offset_units")
"""The tensors of a weight in safetensors, after its name and `_`."""
_LEVELS = np.array(gguf.quants.IQ4_NL.kvalues, np.int8)


@dataclass(frozen=True, slots=True)
class Format:
    """How the integers of a matrix are kept."""

    bits: int
    group: int
    """Inputs that share a scale."""
    with_offsets: bool = False
    with_units: bool = False
    """Whether scales and offsets are integers."""
    floats: bool = False
    """Whether codes are floats, and scales powers of two."""

    @property
    def name(self) -> str:
        """As the quantization method gguf reads it."""
        if self.floats:
            return "mxfp4"
        marks = ((self.with_offsets, "_offsets"), (self.with_units, "_units"))
        return f"int{self.bits}_{self.group}{''.join(mark for has, mark in marks if has)}"


FP4 = Format(4, 32, floats=True)
"""MXFP4, which is no `AffineInts`; see `four_bit_floats`."""


class _Block(NamedTuple):
    """Decoded blocks: codes [blocks, inputs] as they are stored, and of each group the others."""

    codes: NDArray[np.int8 | np.uint8]
    scales: Numbers | NDArray[np.int8]
    offsets: Numbers | NDArray[np.int8] | None = None
    scale_units: Units | None = None
    offset_units: Units | None = None


def kept_format(kind: gguf.GGMLQuantizationType) -> Format:
    """The format of a type in `KEPT`."""
    return KEPT[kind][1]


def joined(*formats: Format) -> Format:
    """One that has the numbers of all."""
    return Format(
        max(each.bits for each in formats),
        min(each.group for each in formats),
        any(each.with_offsets for each in formats),
        any(each.with_units for each in formats),
    )


def decoded(rows: Bytes, kind: gguf.GGMLQuantizationType) -> AffineInts:
    """The numbers of `rows` [O, bytes], of a type in `KEPT`, without rounding."""
    decode, format = KEPT[kind]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    block = decode(np.ascontiguousarray(rows).reshape(-1, size))
    parts = {
        name: torch.from_numpy(np.ascontiguousarray(part).reshape(len(rows), -1))
        for name, part in block._asdict().items()
        if part is not None
    }
    if format.bits == 4:
        parts["codes"] = parts["codes"][:, 0::2] | parts["codes"][:, 1::2] << 4
    return AffineInts(**parts, narrow=format.bits == 6)


def four_bit_floats(rows: Bytes) -> tuple[Tensor, Tensor]:
    """MXFP4 rows [..., bytes]: codes [..., I / 32, 16], two in a byte, and exponents [..., I / 32].

    A block is an exponent and 16 bytes: low nibbles of the first 16 inputs, high ones of the others.
    """
    blocks = rows.reshape(*rows.shape[:-1], -1, 17)
    codes = np.concatenate((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return torch.from_numpy(pairs), torch.from_numpy(np.array(blocks[..., 0]))


def in_format(weight: AffineInts, format: Format) -> AffineInts:
    """The same numbers, in a format that `joined` made of theirs and others."""
    codes = weight.codes
    scales = weight.scales
    offsets = weight.offsets
    units = [weight.scale_units, weight.offset_units]
    if format.with_units and units[0] is None:
        # Float16 numbers are units of ones.
        units = [None if part is None else part.half() for part in (scales, offsets)]
        scales = torch.ones_like(scales, dtype=torch.int8)
        offsets = None if offsets is None else scales
    if format.bits > weight.bits == 4:
        codes = _signed(codes, ZERO if offsets is None else 0)
    if format.with_offsets and offsets is None:
        # 4-bit codes with offsets are stored as they are, others plus 8.
        less = -ZERO if format.bits == 4 else 0
        offsets = scales if format.with_units else less * scales
        units[1] = None if units[0] is None else less * units[0]
    repeats = weight.group // format.group
    terms = {"scales": scales, "offsets": offsets, "scale_units": units[0], "offset_units": units[1]}
    repeated = {name: part.repeat_interleave(repeats, -1) for name, part in terms.items() if part is not None}
    return AffineInts(codes, **repeated, narrow=format.bits == 6)


def _signed(codes: Tensor, zero: int) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) - zero


def _floats(blocks: Bytes, at: int, count: int = 1) -> Numbers:
    """So many float16 numbers from byte `at` on."""
    found: Numbers = blocks[:, at : at + 2 * count].copy().view(np.float16).astype(np.float32)
    return found


def _nibbles(part: Bytes) -> Bytes:
    """Nibbles of a block: the low ones of all bytes, then the high ones."""
    return _nibbles_of(part, part.shape[1])


def _nibbles_of(part: Bytes, together: int) -> Bytes:
    """Nibbles: the low ones of `together` bytes, then their high ones; then those of the next bytes."""
    each = part.reshape(len(part), -1, together)
    return np.concatenate((each & 15, each >> 4), axis=2).reshape(len(part), -1)


def _single_bits(part: Bytes) -> Bytes:
    """The lowest bits of all bytes, then the next ones."""
    found: Bytes = part[:, None] >> np.arange(8, dtype=np.uint8)[None, :, None] & np.uint8(1)
    return found.reshape(len(part), -1)


def _fifth_bits(part: Bytes) -> Bytes:
    """One bit for each input, as 16 times the bit."""
    return np.unpackbits(part, axis=1, bitorder="little") * np.uint8(16)


def _q4_0(blocks: Bytes) -> _Block:
    return _Block(_nibbles(blocks[:, 2:]), _floats(blocks, 0))


def _q4_1(blocks: Bytes) -> _Block:
    return _Block(_nibbles(blocks[:, 4:]), _floats(blocks, 0), _floats(blocks, 2))


def _q5_0(blocks: Bytes) -> _Block:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _Block(codes.astype(np.int8) - 16, _floats(blocks, 0))


def _q5_1(blocks: Bytes) -> _Block:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _Block(codes.astype(np.int8), _floats(blocks, 0), _floats(blocks, 2))


def _q8_0(blocks: Bytes) -> _Block:
    return _Block(blocks[:, 2:].view(np.int8), _floats(blocks, 0))


def _in_groups(blocks: Bytes, at: int, groups: int, factor: float = 1.0) -> Units:
    """`factor` times the float16 number at byte `at`, for each group."""
    unit = (_floats(blocks, at) * np.float32(factor)).astype(np.float16)
    return unit.repeat(groups, 1)


def _two_bits(part: Bytes, together: int = 32) -> Bytes:
    """Pairs of bits: the lowest of `together` bytes, then the next ones; then those of the next bytes."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    found: Bytes = part.reshape(len(part), -1, 1, together) >> shifts & np.uint8(3)
    return found.reshape(len(part), -1)


def _q2_k(blocks: Bytes) -> _Block:
    scales = blocks[:, :16] & 15
    minima = blocks[:, :16] >> 4
    units = _in_groups(blocks, 80, 16), _in_groups(blocks, 82, 16, -1.0)
    return _Block(_two_bits(blocks[:, 16:80]), scales.view(np.int8), minima.view(np.int8), *units)


def _q3_k(blocks: Bytes) -> _Block:
    # The third bit is that of -4, inverted; codes are stored plus 8.
    codes = _two_bits(blocks[:, 32:96]) + 4 + (_single_bits(blocks[:, :32]) << 2)
    low = _nibbles(blocks[:, 96:104])
    scales = (low | _two_bits(blocks[:, 104:108], 4) << 4).astype(np.int8) - 32
    return _Block(codes, scales, scale_units=_in_groups(blocks, 108, 16))


def _six_bits(blocks: Bytes) -> tuple[NDArray[Any], ...]:
    """Scales and minima of the 8 groups of a block of Q4_K or Q5_K, and their units."""
    first, second, last = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((first & 63, (last & 15) | (first >> 6) << 4), axis=1)
    minima = np.concatenate((second & 63, (last >> 4) | (second >> 6) << 4), axis=1)
    units = _in_groups(blocks, 0, 8), _in_groups(blocks, 2, 8, -1.0)
    return scales.view(np.int8), minima.view(np.int8), *units


def _q4_k(blocks: Bytes) -> _Block:
    return _Block(_nibbles_of(blocks[:, 16:], 32), *_six_bits(blocks))


def _q5_k(blocks: Bytes) -> _Block:
    codes = _nibbles_of(blocks[:, 48:], 32) | _single_bits(blocks[:, 16:48]) << 4
    return _Block(codes.astype(np.int8), *_six_bits(blocks))


def _q6_k(blocks: Bytes) -> _Block:
    codes = (_nibbles_of(blocks[:, :128], 64) | _two_bits(blocks[:, 128:192]) << 4).astype(np.int8) - 32
    return _Block(codes, blocks[:, 192:208].view(np.int8), scale_units=_in_groups(blocks, 208, 16))


def _iq4_nl(blocks: Bytes) -> _Block:
    return _Block(_LEVELS[_nibbles(blocks[:, 2:])], _floats(blocks, 0))


def _iq4_xs(blocks: Bytes) -> _Block:
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(len(blocks), 8)
    scales = (low | _two_bits(blocks[:, 2:4], 1) << 4).astype(np.int8) - 32
    return _Block(_LEVELS[_nibbles_of(blocks[:, 8:], 16)], scales, scale_units=_in_groups(blocks, 0, 8))


KEPT: dict[gguf.GGMLQuantizationType, tuple[Callable[[Bytes], _Block], Format]] = {
    _Type.Q4_0: (_q4_0, Format(4, 32)),
    _Type.Q4_1: (_q4_1, Format(4, 32, True)),
    _Type.Q5_0: (_q5_0, Format(6, 32)),
    _Type.Q5_1: (_q5_1, Format(6, 32, True)),
    _Type.Q8_0: (_q8_0, Format(8, 32)),
    _Type.Q2_K: (_q2_k, Format(4, 16, True, True)),
    _Type.Q3_K: (_q3_k, Format(4, 16, False, True)),
    _Type.Q4_K: (_q4_k, Format(4, 32, True, True)),
    _Type.Q5_K: (_q5_k, Format(6, 32, True, True)),
    _Type.Q6_K: (_q6_k, Format(6, 16, False, True)),
    _Type.IQ4_NL: (_iq4_nl, Format(8, 32)),
    _Type.IQ4_XS: (_iq4_xs, Format(8, 32, False, True)),
}
"""The types whose integers are kept, their decoders and formats."""
