"""MXFP4 (OCP microscaling): 4-bit floats in blocks of 32 that share a scale.

blocks [..., N/32, 16] u8    low nibble: even element, high nibble: odd; 1 sign, 2 exponent, 1 mantissa bit
scales [..., N/32] u8        exponent of 2, plus 127
"""

import torch
from torch import Tensor

BLOCK = 32

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_EXPONENT_OF_ONE = 127


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values in float32, [..., N]; exact, also when rounded to bfloat16."""
    values = torch.tensor(_VALUES, device=blocks.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)  # by byte
    exponents = torch.arange(256, device=blocks.device) - _EXPONENT_OF_ONE
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    numbers = pairs.index_select(0, blocks.flatten().int()).view(*scales.shape, BLOCK)
    return numbers.mul_(powers[scales.int()].unsqueeze(-1)).flatten(-2)
