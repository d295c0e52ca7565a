"""AITER's functions that treat each row of features by itself."""

import torch
from torch import Tensor
from torch.nn import functional


def check_rows(*tensors: Tensor) -> None:
    for each in tensors:
        assert each.dim() == 2 and each.is_contiguous() and each.shape == tensors[0].shape
        assert each.dtype == tensors[0].dtype


def normed(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    assert weight.shape == rows.shape[1:] and weight.dtype == rows.dtype and isinstance(epsilon, float)
    wide = rows.float()
    return (wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + epsilon) * weight.float()).to(rows.dtype)


def rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[tokens, hidden]."""
    check_rows(input)
    return normed(input, weight, epsilon)


def rmsnorm2d_fwd_with_add(
    out: Tensor, input: Tensor, residual_in: Tensor, residual_out: Tensor, weight: Tensor, epsilon: float
) -> None:
    """residual_out = input + residual_in; out = its norm."""
    check_rows(out, input, residual_in, residual_out)
    residual_out.copy_(input + residual_in)
    out.copy_(normed(residual_out, weight, epsilon))


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """The gate is the first half of a row."""
    assert input.is_contiguous() and out.is_contiguous() and input.dtype == out.dtype
    assert out.shape == (*input.shape[:-1], input.shape[-1] // 2)
    gate, up = input.split(out.shape[-1], -1)
    out.copy_(functional.silu(gate.float()) * up.float())


def rope_cached_fwd(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> Tensor:
    """[s, b, h, d] with cosines and sines [s, 1, 1, r / 2]: style 0 turns halves, 1 neighbours."""
    assert reuse_freqs_front_part and not nope_first and rotate_style in (0, 1)
    length, _, _, width = input.shape
    half = cos.shape[-1]
    assert cos.shape == sin.shape == (length, 1, 1, half) and 2 * half <= width
    assert input.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    turned, rest = input[..., : 2 * half].float(), input[..., 2 * half :]
    if rotate_style == 0:
        first, second = turned[..., :half], turned[..., half:]
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
    parts = first * cos - second * sin, second * cos + first * sin
    joined = torch.cat(parts, -1) if rotate_style == 0 else torch.stack(parts, -1).flatten(-2)
    return torch.cat((joined.to(input.dtype), rest), -1)
