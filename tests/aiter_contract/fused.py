"""AITER's norms and activations that also quantize what they return."""

import torch
from torch import Tensor
from torch.nn import functional

from tests.aiter_contract import machine, mxfp4, rounding
from tests.aiter_contract.rows import check_rows, normed


def rmsnorm2d_fwd_with_dynamicquant(
    out: Tensor, input: Tensor, yscale: Tensor, weight: Tensor, epsilon: float
) -> None:
    """A scale for each token, [M, 1]."""
    check_rows(input)
    _write(out, yscale, normed(input, weight, epsilon))


def rmsnorm2d_fwd_with_add_dynamicquant(
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    yscale: Tensor,
    weight: Tensor,
    epsilon: float,
) -> None:
    """residual_out = input + residual_in; out = its norm, quantized."""
    check_rows(input, residual_in, residual_out)
    residual_out.copy_(input + residual_in)
    _write(out, yscale, normed(residual_out, weight, epsilon))


def _write(out: Tensor, yscale: Tensor, rows: Tensor) -> None:
    assert out.dtype == machine.fp8() and out.shape == rows.shape and out.is_contiguous()
    assert yscale.dtype == torch.float32 and yscale.shape == (len(rows), 1)
    values, scales = rounding.by_group(rows, out.dtype, rows.shape[1])
    out.copy_(values)
    yscale.copy_(scales)


def fused_rms_fp8_group_quant(
    inp1: Tensor,
    inp1_weight: Tensor,
    inp1_epsilon: float,
    group_size: int,
    dtype_quant: torch.dtype,
    res1: Tensor | None,
    transpose_scale: bool,
) -> tuple[tuple[Tensor, Tensor], None, None, Tensor | None]:
    """Values and scales of the norm of inp1 + res1; the sum. Rows may be apart."""
    inp1 = inp1.contiguous()
    assert dtype_quant == machine.fp8() and isinstance(transpose_scale, bool)
    rows, total = _sum(inp1, res1)
    values, scales = rounding.by_group(normed(rows, inp1_weight, inp1_epsilon), dtype_quant, group_size)
    return (values, rounding.in_columns(scales) if transpose_scale else scales), None, None, total


def fused_rms_mxfp4_quant(
    x1: Tensor, x1_weight: Tensor, x1_epsilon: float, res1: Tensor | None, shuffle: bool
) -> tuple[tuple[Tensor, Tensor], None, Tensor | None]:
    """Codes and scales of the norm of x1 + res1 in bytes; the sum."""
    rows, total = _sum(x1, res1)
    return _bytes(normed(rows, x1_weight, x1_epsilon), shuffle), None, total


def _sum(rows: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    check_rows(rows, *([] if residual is None else [residual]))
    return (rows, None) if residual is None else (rows + residual, rows + residual)


def _gated(rows: Tensor) -> Tensor:
    assert rows.dim() == 2 and rows.is_contiguous() and len(rows)
    gate, up = rows.float().chunk(2, -1)
    return functional.silu(gate) * up


def scaled_silu_and_mul(out: Tensor, input: Tensor, scale: Tensor) -> None:
    """By a given scale [1], which divides."""
    assert out.dtype == machine.fp8() and scale.dtype == torch.float32 and scale.shape == (1,)
    out.copy_(rounding.cast(_gated(input) / scale, out.dtype))


def act_mul_and_fp8_group_quant(
    x: Tensor, activation: str, group_size: int, dtype_quant: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A scale for each group of a row, row by row."""
    assert activation == "silu" and dtype_quant == machine.fp8()
    return rounding.by_group(_gated(x), dtype_quant, group_size)


def act_mul_and_mxfp4_quant(x: Tensor, activation: str, shuffle: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales in bytes."""
    assert activation == "silu"
    return _bytes(_gated(x), shuffle)


def _bytes(rows: Tensor, shuffle: bool) -> tuple[Tensor, Tensor]:
    values, scales = mxfp4.per_1x32_f4_quant_hip(rows, torch.float4_e2m1fn_x2, shuffle)
    return values.view(torch.uint8), scales.view(torch.uint8)
