"""Norms and gated activations whose kernels also round their results for the quantized layer after them.

weight        RMS norm, and with a residual                             SiLU-mul
BlockFP8      fused_rms_fp8_group_quant                                 act_mul_and_fp8_group_quant
ChannelFP8    rmsnorm2d_fwd_with_dynamicquant, …_with_add_dynamicquant  scaled_silu_and_mul, if static
MXFP4         fused_rms_mxfp4_quant                                     act_mul_and_mxfp4_quant
"""

import torch
from torch import Tensor

from atom_ops.aiter_impl import NEEDS, mxfp4, runs_on, takes
from atom_ops.aiter_impl.norm import MOST_FEATURES
from atom_ops.aiter_impl.quantized_linear import finished, multiply_rounded
from atom_ops.aiter_impl.rounding import GROUP, Rounded
from atom_ops.ops.linear.fused_linear import add_norm_linear, silu_and_mul_linear
from atom_ops.weights import BlockFP8, ChannelFP8, ShuffledFP8, ShuffledMXFP4, Weight


def norm_supports(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None = None,
) -> bool:
    """Whether one kernel computes the norm and rounds for the weight."""
    given = (x_TD, norm_weight_D) if residual_TD is None else (x_TD, residual_TD, norm_weight_D)
    if not takes(*given) or x_TD.shape[1] > MOST_FEATURES:
        return False
    if isinstance(weight, ShuffledFP8):
        return isinstance(weight.weight, BlockFP8) or _scaled_by_token(weight.weight)
    return isinstance(weight, ShuffledMXFP4)


def _scaled_by_token(weight: ChannelFP8) -> bool:
    return weight.input_scale is None and weight.input_bound is None


@add_norm_linear.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=norm_supports,
    batch_invariant=False,
    quantizes_activations=True,
)
def norm_linear(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight: ShuffledFP8 | ShuffledMXFP4,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    by_block = isinstance(weight, ShuffledFP8) and isinstance(weight.weight, BlockFP8)
    if residual_TD is not None:
        residual_TD = residual_TD.contiguous()
    if residual_TD is not None or not by_block:  # that kernel alone takes rows that are apart
        x_TD = x_TD.contiguous()
    if isinstance(weight, ShuffledMXFP4):
        rounded, total_TD = _norm_mxfp4(x_TD, residual_TD, norm_weight_D, eps)
        out_TO = mxfp4.multiply_rounded(rounded, weight, x_TD.dtype)
    else:
        by_norm = _norm_groups if by_block else _norm_tokens
        dtype = weight.weight.values.dtype
        rounded, total_TD = by_norm(x_TD, residual_TD, norm_weight_D, eps, dtype)
        out_TO = multiply_rounded(rounded, weight, x_TD.dtype)
    return finished(out_TO, bias, None), x_TD if total_TD is None else total_TD


def _norm_groups(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Rounded, Tensor | None]:
    from aiter.ops.triton.fused_fp8_quant import fused_rms_fp8_group_quant

    rounded, _, _, total_TD = fused_rms_fp8_group_quant(
        inp1=x_TD,
        inp1_weight=norm_weight_D,
        inp1_epsilon=eps,
        group_size=GROUP,
        dtype_quant=dtype,
        res1=residual_TD,
        transpose_scale=True,
    )
    return rounded, total_TD


def _norm_tokens(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Rounded, Tensor | None]:
    import aiter

    values_TD = torch.empty_like(x_TD, dtype=dtype)
    scales_T1 = torch.empty(len(x_TD), 1, dtype=torch.float32, device=x_TD.device)
    if residual_TD is None:
        aiter.rmsnorm2d_fwd_with_dynamicquant(
            out=values_TD, input=x_TD, yscale=scales_T1, weight=norm_weight_D, epsilon=eps
        )
        return (values_TD, scales_T1), None
    total_TD = torch.empty_like(x_TD)
    aiter.rmsnorm2d_fwd_with_add_dynamicquant(
        out=values_TD,
        input=x_TD,
        residual_in=residual_TD,
        residual_out=total_TD,
        yscale=scales_T1,
        weight=norm_weight_D,
        epsilon=eps,
    )
    return (values_TD, scales_T1), total_TD


def _norm_mxfp4(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float
) -> tuple[Rounded, Tensor | None]:
    from aiter.ops.triton.fused_mxfp4_quant import fused_rms_mxfp4_quant

    (codes, scales), *_, total_TD = fused_rms_mxfp4_quant(
        x1=x_TD, x1_weight=norm_weight_D, x1_epsilon=eps, res1=residual_TD, shuffle=True
    )
    return mxfp4.typed(codes, scales), total_TD


def _gate_supports(x_T2F: Tensor, weight: Weight, bias: Tensor | None = None) -> bool:
    if not takes(x_T2F):
        return False
    if isinstance(weight, ShuffledFP8):
        return isinstance(weight.weight, BlockFP8) or weight.weight.input_scale is not None
    return isinstance(weight, ShuffledMXFP4)


@silu_and_mul_linear.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=_gate_supports,
    batch_invariant=False,
    quantizes_activations=True,
)
def _gate_linear(x_T2F: Tensor, weight: ShuffledFP8 | ShuffledMXFP4, bias: Tensor | None = None) -> Tensor:
    x_T2F = x_T2F.contiguous()
    if isinstance(weight, ShuffledMXFP4):
        from aiter.ops.triton.activation import act_mul_and_mxfp4_quant

        codes, scales = act_mul_and_mxfp4_quant(x=x_T2F, activation="silu", shuffle=True)
        out_TO = mxfp4.multiply_rounded(mxfp4.typed(codes, scales), weight, x_T2F.dtype)
    else:
        gate = _gate_groups if isinstance(weight.weight, BlockFP8) else _gate_static
        out_TO = multiply_rounded(gate(x_T2F, weight.weight), weight, x_T2F.dtype)
    return finished(out_TO, bias, None)


def _gate_groups(x_T2F: Tensor, weight: BlockFP8 | ChannelFP8) -> Rounded:
    from aiter.ops.triton.activation import act_mul_and_fp8_group_quant

    values_TF, scales_TG = act_mul_and_fp8_group_quant(
        x=x_T2F, activation="silu", group_size=GROUP, dtype_quant=weight.values.dtype
    )
    return values_TF, scales_TG.t().contiguous().view(scales_TG.shape)  # the GEMM reads columns


def _gate_static(x_T2F: Tensor, weight: BlockFP8 | ChannelFP8) -> Rounded:
    import aiter

    assert isinstance(weight, ChannelFP8) and weight.input_scale is not None, "checked by `_gate_supports`"
    values_TF = x_T2F.new_empty(len(x_T2F), x_T2F.shape[1] // 2, dtype=weight.values.dtype)
    scale_1 = weight.input_scale.reshape(1)
    aiter.scaled_silu_and_mul(out=values_TF, input=x_T2F, scale=scale_1)
    return values_TF, scale_1.expand(len(x_T2F), 1).contiguous()
