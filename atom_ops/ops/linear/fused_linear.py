"""GEMMs fused with the element-wise op before them.

For one or two tokens, launching a small kernel and waiting for it costs more than repeating its
work in every program of the GEMM. The references just call the separate ops, which also run
wherever no fused kernel is faster.

An op receives the weight, so that a provider for quantized weights can also quantize its output of
the norm or the activation in the same kernel, in the form that the GEMM wants.
"""

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.elementwise.activation import silu_and_mul
from atom_ops.ops.elementwise.norm import add_rms_norm, rms_norm
from atom_ops.ops.linear.linear import linear
from atom_ops.tolerances import REDUCTION
from atom_ops.weights import Weight
from atom_ops.weights.samples import ROUNDED, Format, random_weight


def _bias(outputs: int, with_bias: bool, dtype: torch.dtype, generator: torch.Generator) -> Tensor | None:
    return torch.randn(outputs, generator=generator).to(dtype) if with_bias else None


def _norm_case(
    tokens: int, inputs: int, outputs: int, with_residual: bool, with_bias: bool, format: Format = "plain"
) -> Case:
    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, Tensor | None, Tensor, float, Weight, Tensor | None]:
        x, residual = torch.randn(2, tokens, inputs, generator=generator).to(dtype)
        norm_weight = torch.rand(inputs, generator=generator).to(dtype)
        weight = random_weight((outputs, inputs), format, dtype, generator)
        bias = _bias(outputs, with_bias, dtype, generator)
        return x, residual if with_residual else None, norm_weight, 1e-5, weight, bias

    options = f"{'-residual' if with_residual else ''}{'-bias' if with_bias else ''}"
    label = f"{tokens}x{inputs}x{outputs}{options}{'' if format == 'plain' else f'-{format}'}"
    return Case(label, make, ROUNDED.get(format))


@op(
    [
        _norm_case(1, 576, 240, True, False),
        _norm_case(1, 70, 49, False, True),
        _norm_case(1, 256, 96, True, True),
        _norm_case(3, 64, 40, True, True),
        _norm_case(2, 64, 40, False, False),
        _norm_case(1, 200, 150, True, True, "block_fp8"),
        _norm_case(3, 200, 150, True, False, "channel_fp8"),
    ],
    REDUCTION,
    composed=True,
)
def add_norm_linear(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(linear(rms_norm(x + residual)), x + residual), [T, D] -> [T, O] and [T, D].

    Without a residual the sum is `x_TD` itself. See `linear` for the weight.
    """
    if residual_TD is None:
        return linear(rms_norm(x_TD, norm_weight_D, eps), weight, bias), x_TD
    normed_TD, total_TD = add_rms_norm(x_TD, residual_TD, norm_weight_D, eps)
    return linear(normed_TD, weight, bias), total_TD


def _silu_case(tokens: int, inputs: int, outputs: int, with_bias: bool, format: Format = "plain") -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Weight, Tensor | None]:
        x = torch.randn(tokens, 2 * inputs, generator=generator).to(dtype)
        weight = random_weight((outputs, inputs), format, dtype, generator)
        return x, weight, _bias(outputs, with_bias, dtype, generator)

    options = f"{'-bias' if with_bias else ''}{'' if format == 'plain' else f'-{format}'}"
    return Case(f"{tokens}x{inputs}x{outputs}{options}", make, ROUNDED.get(format))


@op(
    [
        _silu_case(1, 1536, 64, False),
        _silu_case(1, 70, 49, True),
        _silu_case(1, 320, 96, False),
        _silu_case(3, 40, 64, True),
        _silu_case(1, 260, 140, False, "block_fp8"),
        _silu_case(3, 260, 140, False, "channel_int8"),
    ],
    REDUCTION,
    composed=True,
)
def silu_and_mul_linear(x_T2F: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """linear(silu(first half) * second half), [T, 2F] -> [T, O]. See `linear` for the weight."""
    return linear(silu_and_mul(x_T2F), weight, bias)
