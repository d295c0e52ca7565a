"""Rounds plain matrices to quantized ones, as online quantization does while it loads.

All map some rows of a matrix, [N, I] in the compute dtype, to the tensors of a weight of these rows. They
compute in float32, on the device of the matrix. A row or group of zeros has scale 1.
"""

import torch
from torch import Tensor

from workers.layers.quantization.words import pairs_of_numbers

_E4M3_MAX = 448.0
_E4M3_FACTORS = tuple(2 ** (eighth / 8) for eighth in range(8))
"""Scales that are tried, as multiples of the smallest: the next, 2, would give the same digits again."""
_INT8_MAX = 127
_CODES = 15
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Magnitudes halfway between two of e2m1, which are rounded to the even code."""
_MXFP4_GROUP = 32
_BIAS = 127
_MAX_EXPONENT = 254
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Ranges that are tried for a group of INT4, as parts of the range of its numbers."""


def to_channel_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [N, I] and scales [N, 1]."""
    return _e4m3_of_least_error(matrix.float(), (1,))


def to_block_fp8(rows: int, columns: int, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [N, I] and a scale for each block; the last blocks may be smaller."""
    outputs, inputs = matrix.shape
    padded = torch.zeros(-(-outputs // rows) * rows, -(-inputs // columns) * columns, device=matrix.device)
    padded[:outputs, :inputs] = matrix
    codes, scales = _e4m3_of_least_error(padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)), (1, 3))
    return codes.flatten(2, 3).flatten(0, 1)[:outputs, :inputs], scales[:, 0, :, 0]


def to_channel_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [N, I] and scales [N, 1]: a row's largest magnitude becomes 127."""
    numbers = matrix.float()
    scales = _scales(numbers.abs().amax(1, keepdim=True), _INT8_MAX)
    return (numbers / scales).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8), scales


def to_group_int4(group: int, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of codes [N, I / 2], scales and zero points [N, I / group].

    Of several ranges around zero, each group takes the one with the smallest squared error: fewer steps
    for its largest numbers, finer ones for all others.
    """
    numbers = matrix.float().unflatten(1, (-1, group))
    low = numbers.amin(2, keepdim=True).clamp_(max=0)
    high = numbers.amax(2, keepdim=True).clamp_(min=0)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = numbers.new_full(low.shape, torch.inf)
    for part in _SHRINK:
        # Rounded as it is stored, so that codes are chosen for the scale that they are multiplied by.
        scales = _scales(part * (high - low), _CODES).to(matrix.dtype)
        zeros = (-part * low / scales.float()).round_().clamp_(0, _CODES)
        codes = (numbers / scales.float() + zeros).round_().clamp_(0, _CODES)
        errors = ((codes - zeros) * scales.float() - numbers).square_().sum(2, keepdim=True)
        better = errors < least
        least = torch.where(better, errors, least)
        found = (codes, scales, zeros)
        pairs = zip(found, best or found, strict=True)
        best = found if best is None else tuple(torch.where(better, new, old) for new, old in pairs)  # type: ignore[assignment]
    assert best is not None
    codes, scales, zeros = best
    return pairs_of_numbers(codes.flatten(1).to(torch.uint8)), scales[..., 0], zeros[..., 0].to(torch.uint8)


def to_mxfp4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of e2m1 codes [N, I / 2] and exponents [N, I / 32].

    A group's largest magnitude becomes 4 to 8, of which e2m1 has up to 6, or half as much, whichever
    gives the smaller squared error.
    """
    numbers = matrix.float().unflatten(1, (-1, _MXFP4_GROUP))
    largest = numbers.abs().amax(2, keepdim=True)
    exponents = (largest.frexp().exponent - 3).where(largest > 0, 0).clamp(-_BIAS, _MAX_EXPONENT - _BIAS - 1)
    codes, errors = _e2m1(numbers, exponents)
    other_codes, other_errors = _e2m1(numbers, exponents + 1)
    better = other_errors < errors
    codes = torch.where(better, other_codes, codes)
    biased = (exponents + better.int() + _BIAS).to(torch.uint8)
    return pairs_of_numbers(codes.flatten(1)), biased[..., 0]


def _scales(largest: Tensor, code: float) -> Tensor:
    """Scales with which the largest magnitudes become `code`."""
    return torch.where(largest > 0, largest / code, 1.0)


def _e4m3_of_least_error(numbers: Tensor, shared: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """e4m3 codes, and scales that the dimensions `shared` have in common.

    Of several scales with which the largest magnitudes become 448 to 224, those with the smallest squared
    error: a float's relative error depends on where between two powers of two the numbers are.
    """
    smallest = _scales(numbers.abs().amax(shared, keepdim=True), _E4M3_MAX)
    codes = torch.zeros_like(numbers, dtype=torch.uint8)
    best = smallest
    least = torch.full_like(smallest, torch.inf)
    for factor in _E4M3_FACTORS:
        scales = smallest * factor
        found = _e4m3(numbers / scales)
        errors = found.float().mul_(scales).sub_(numbers).square_().sum(shared, keepdim=True)
        better = errors < least
        codes = torch.where(better, found.view(torch.uint8), codes)
        best = torch.where(better, scales, best)
        least = torch.where(better, errors, least)
    return codes.view(torch.float8_e4m3fn), best


def _e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp_(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def _e2m1(numbers: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of groups [N, G, 32] with these exponents [N, G, 1], and the squared error of each group."""
    powers = torch.ldexp(torch.ones_like(numbers[..., :1]), exponents)
    scaled = numbers / powers
    between = torch.tensor(_BETWEEN, device=numbers.device)
    # A number halfway belongs to the lower code if that is even: bucketize puts all of them there.
    between[1::2] = torch.nextafter(between[1::2], between.new_zeros(()))
    codes = torch.bucketize(scaled.abs().contiguous(), between)
    rounded = torch.tensor(_E2M1, device=numbers.device)[codes].copysign(scaled) * powers
    errors = (rounded - numbers).square_().sum(2, keepdim=True)
    return (codes + 8 * scaled.signbit()).to(torch.uint8), errors
