"""AITER's quantization of activations, which each GEMM and its fusions share.

torch's conversion to 8-bit floats has no saturation, so that values are clamped first.
"""

import torch
from torch import Tensor


def largest(dtype: torch.dtype) -> float:
    return float(torch.iinfo(dtype).max) if dtype == torch.int8 else torch.finfo(dtype).max


def cast(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    bound = largest(dtype)
    numbers = numbers.clamp(-bound, bound)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype)


def by_group(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """Values and scales [..., I / group] of groups of a row."""
    groups = x.float().unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1).clamp(min=1e-10) / largest(dtype)
    return cast(groups / scales.unsqueeze(-1), dtype).flatten(-2), scales


def in_columns(scales: Tensor) -> Tensor:
    """The same shape, column after column in memory."""
    return scales.T.contiguous().view(scales.shape)


def from_columns(scales: Tensor) -> Tensor:
    assert scales.is_contiguous()
    return scales.view(scales.shape[1], scales.shape[0]).T


def per_token_quant_hip(x: Tensor, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales [M, 1]."""
    assert x.dim() == 2 and x.is_contiguous() and len(x)
    return by_group(x, quant_dtype, x.shape[1])


def per_group_quant_hip(
    x: Tensor, quant_dtype: torch.dtype, group_size: int, transpose_scale: bool
) -> tuple[Tensor, Tensor]:
    """Scales [M, I / group_size]."""
    assert x.dim() == 2 and x.is_contiguous() and len(x) and group_size in (32, 64, 128)
    values, scales = by_group(x, quant_dtype, group_size)
    return values, in_columns(scales) if transpose_scale else scales


def per_tensor_quant_hip(x: Tensor, scale: Tensor, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """With the given scale [1]."""
    assert x.is_contiguous() and scale.dtype == torch.float32 and scale.shape == (1,)
    return cast(x.float() / scale, quant_dtype), scale
