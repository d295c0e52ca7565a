"""NVFP4: 4-bit floats (e2m1) with a float8 scale for each group of 16 inputs, and one for the whole matrix.

                     codes: two in a byte      scales, e4m3              of the matrix
modelopt             weight [O, I / 2]         weight_scale [O, I / 16]  weight_scale_2: a factor
compressed-tensors   weight_packed [O, I / 2]  weight_scale [O, I / 16]  weight_global_scale: a divisor

Twice a code is an integer, so the numbers are `AffineInts` of six bits. Kernels of CPUs read these; elsewhere
they are dequantized when they are loaded. Activations are not rounded, whatever the config says.
"""

from functools import cache

import torch
from torch import Tensor

from atom_ops import AffineInts
from workers.layers.quantization.channel_scales import shapes_of_one
from workers.layers.quantization.fills import constant_fill, fill_codes
from workers.layers.quantization.scheme import FLOATS, WHOLE, Matrix, Packing, Scheme, StoredTensor

GROUP = 16
_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the numbers of e2m1."""
_CODES_STD = 5.8
_BYTES_AT_ONCE = 1 << 22
"""Bytes of codes that are unpacked at once: an index takes several times the memory of what it selects."""


@cache
def modelopt() -> Scheme:
    """As modelopt names and scales them."""
    return _scheme("weight", "weight_scale_2", divides=False, unused="input_scale")


@cache
def compressed_tensors() -> Scheme:
    """As compressed-tensors does."""
    return _scheme("weight_packed", "weight_global_scale", divides=True, unused="input_global_scale")


def _scheme(codes: str, factor: str, divides: bool, unused: str) -> Scheme:
    def repeated(scale: Tensor, matrix: Matrix) -> Tensor:
        scale = scale.float().reshape(1, 1)
        return (scale.reciprocal() if divides else scale).expand(matrix[0], 1)

    packing = Packing(codes, (1, 2), transposed=False, unpack=_integers)
    return Scheme(
        "NVFP4",
        (1, GROUP),
        (
            StoredTensor("_codes", (1, 1), (torch.uint8,), fill_codes(_CODES_STD), torch.int8, packing),
            StoredTensor(
                "_scales",
                (1, GROUP),
                (torch.float8_e4m3fn,),
                constant_fill(_CODES_STD / 2),
                torch.float32,
                names=("weight_scale",),
            ),
            StoredTensor(
                "_factors",
                (1, WHOLE),
                FLOATS,
                _ones,
                torch.float32,
                names=(factor,),
                disk_shapes=shapes_of_one,
                decode=repeated,
            ),
        ),
        _weight,
        ragged=False,
        mixes=True,
        unused=(unused,),
    )


def _ones(factors: Tensor, std: float, generator: torch.Generator) -> None:
    factors.fill_(1.0)


def _integers(codes: Tensor) -> Tensor:
    """Twice the numbers of bytes with two codes each, int8 [O, I]."""
    pairs_of = _pairs().to(codes.device)
    pairs = torch.empty(codes.shape, dtype=torch.int16, device=codes.device)
    rows = max(1, _BYTES_AT_ONCE // codes.shape[1])
    for some, part in zip(pairs.split(rows), codes.split(rows), strict=True):
        some.copy_(pairs_of[part.int()])
    return pairs.view(torch.int8)


def _pairs() -> Tensor:
    """For each byte the integers of its low and its high code, as one of 16 bits."""
    integers = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)], dtype=torch.int8)
    codes = torch.arange(256)
    return torch.stack((integers[codes & 15], integers[codes >> 4]), -1).view(torch.int16).flatten()


def _weight(codes: Tensor, scales: Tensor, factors: Tensor) -> AffineInts:
    return AffineInts(codes, scales * factors / 2, narrow=True)
