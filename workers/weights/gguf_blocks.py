"""The quantized blocks of GGUF files as `AffineInts`: integers, and a scale and an offset for each group.

A row of a tensor is a sequence of blocks, of 32 or 256 inputs:

    Q4_0   scale | 16 bytes                          4 bits, less 8
    Q4_1   scale, offset | 16 bytes
    Q5_0   scale | 4 bytes of fifth bits | 16 bytes  5 bits, less 16
    Q5_1   scale, offset | 4 | 16 bytes
    Q8_0   scale | 32 bytes                          signed
    Q4_K   scale, unit of minima | 12 bytes: 8 scales and 8 minima of 6 bits | 128 bytes
    Q5_K   the same | 32 bytes of fifth bits | 128 bytes
    Q6_K   128 bytes | 64 bytes of upper bits | 16 scales | scale      6 bits, less 32

Floats are float16. The layout was read from ggml's description, and is compared with the decoder of the
Python package `gguf` in the tests.
"""

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atom_ops import AffineInts

Bytes = NDArray[np.uint8]
"""[blocks, bytes]."""
Numbers = NDArray[np.float32]
"""[blocks, groups]."""
_Block = tuple[NDArray[np.int8], Numbers, Numbers | None]
"""Codes [blocks, inputs], scales and offsets."""
_Type = gguf.GGMLQuantizationType


@dataclass(frozen=True, slots=True)
class Format:
    """How the integers of a matrix are kept."""

    bits: int
    group: int
    """Inputs that share a scale."""
    with_offsets: bool

    @property
    def name(self) -> str:
        """As the quantization method gguf reads it."""
        return f"int{self.bits}_{self.group}{'_offsets' if self.with_offsets else ''}"


def kept_format(kind: gguf.GGMLQuantizationType) -> Format:
    """The format of a type in `KEPT`."""
    _, bits, group, with_offsets = KEPT[kind]
    return Format(bits, group, with_offsets)


def joined(*formats: Format) -> Format:
    """One that has the numbers of all."""
    return Format(
        max(each.bits for each in formats),
        min(each.group for each in formats),
        any(each.with_offsets for each in formats),
    )


def decoded(rows: Bytes, kind: gguf.GGMLQuantizationType) -> AffineInts:
    """The numbers of `rows` [O, bytes], of a type in `KEPT`, without rounding."""
    decode, bits, *_ = KEPT[kind]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    codes, scales, offsets = decode(np.ascontiguousarray(rows).reshape(-1, size))
    outputs = len(rows)
    return AffineInts(
        _stored(torch.from_numpy(codes.reshape(outputs, -1)), bits),
        torch.from_numpy(scales.reshape(outputs, -1)),
        None if offsets is None else torch.from_numpy(offsets.reshape(outputs, -1)),
    )


def in_format(weight: AffineInts, format: Format) -> AffineInts:
    """The same numbers, in a format that `joined` made of theirs and others."""
    codes = _signed(weight.codes) if format.bits > weight.bits else weight.codes
    offsets = weight.offsets
    if format.with_offsets and offsets is None:
        offsets = torch.zeros_like(weight.scales)
    repeats = weight.group // format.group
    scales = weight.scales.repeat_interleave(repeats, -1)
    return AffineInts(codes, scales, None if offsets is None else offsets.repeat_interleave(repeats, -1))


def _stored(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    plus = (codes + 8).to(torch.uint8)
    return plus[..., 0::2] | plus[..., 1::2] << 4


def _signed(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) - 8


def _floats(blocks: Bytes, at: int, count: int = 1) -> Numbers:
    """So many float16 numbers from byte `at` on."""
    found: Numbers = blocks[:, at : at + 2 * count].copy().view(np.float16).astype(np.float32)
    return found


def _nibbles(part: Bytes) -> Bytes:
    """Low ones before high ones."""
    return np.concatenate((part & 15, part >> 4), axis=1)


def _fifth_bits(part: Bytes) -> Bytes:
    """One bit for each input, as 16 times the bit."""
    return np.unpackbits(part, axis=1, bitorder="little") * np.uint8(16)


def _q4_0(blocks: Bytes) -> _Block:
    return _nibbles(blocks[:, 2:]).astype(np.int8) - 8, _floats(blocks, 0), None


def _q4_1(blocks: Bytes) -> _Block:
    scale = _floats(blocks, 0)
    return _nibbles(blocks[:, 4:]).astype(np.int8) - 8, scale, _floats(blocks, 2) + 8 * scale


def _q5_0(blocks: Bytes) -> _Block:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return codes.astype(np.int8) - 16, _floats(blocks, 0), None


def _q5_1(blocks: Bytes) -> _Block:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes.astype(np.int8), _floats(blocks, 0), _floats(blocks, 2)


def _q8_0(blocks: Bytes) -> _Block:
    return blocks[:, 2:].copy().view(np.int8), _floats(blocks, 0), None


def _six_bits(blocks: Bytes) -> tuple[Numbers, Numbers]:
    """Scales and minima of the 8 groups of a block of Q4_K or Q5_K."""
    first, second, last = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((first & 63, (last & 15) | (first >> 6) << 4), axis=1)
    minima = np.concatenate((second & 63, (last >> 4) | (second >> 6) << 4), axis=1)
    return scales * _floats(blocks, 0), minima * _floats(blocks, 2)


def _q4_k(blocks: Bytes) -> _Block:
    scales, minima = _six_bits(blocks)
    pairs = blocks[:, 16:].reshape(len(blocks), 4, 32)
    codes = np.stack((pairs & 15, pairs >> 4), axis=2).reshape(len(blocks), 256)
    return codes.astype(np.int8) - 8, scales, 8 * scales - minima


def _q5_k(blocks: Bytes) -> _Block:
    scales, minima = _six_bits(blocks)
    pairs = blocks[:, 48:].reshape(len(blocks), 4, 32)
    low = np.stack((pairs & 15, pairs >> 4), axis=2).reshape(len(blocks), 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1
    return (low | fifth << 4).reshape(len(blocks), 256).astype(np.int8), scales, -minima


def _q6_k(blocks: Bytes) -> _Block:
    low = blocks[:, :128].reshape(len(blocks), 2, 2, 32)
    low = np.concatenate((low & 15, low >> 4), axis=2)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    upper = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> shifts & 3
    codes = (low | upper << 4).reshape(len(blocks), 256).astype(np.int8) - 32
    return codes, blocks[:, 192:208].view(np.int8).astype(np.float32) * _floats(blocks, 208), None


KEPT: dict[gguf.GGMLQuantizationType, tuple[Callable[[Bytes], _Block], int, int, bool]] = {
    _Type.Q4_0: (_q4_0, 4, 32, False),
    _Type.Q4_1: (_q4_1, 4, 32, True),
    _Type.Q5_0: (_q5_0, 8, 32, False),
    _Type.Q5_1: (_q5_1, 8, 32, True),
    _Type.Q8_0: (_q8_0, 8, 32, False),
    _Type.Q4_K: (_q4_k, 4, 32, True),
    _Type.Q5_K: (_q5_k, 8, 32, True),
    _Type.Q6_K: (_q6_k, 8, 16, False),
}
"""The types whose integers are kept: decoder, bits of a code in memory, group, whether it has offsets."""
