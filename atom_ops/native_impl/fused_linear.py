"""Linear layers with the norm or the activation before them, in one call.

The kernels are those of the separate ops: the bits are the same.
"""

import torch
from torch import Tensor

from atom_ops.native_impl import NEEDS, call, runs_on, takes
from atom_ops.native_impl.linear import fits
from atom_ops.ops.fused_linear import add_norm_linear, silu_and_mul_linear
from atom_ops.weights import PackedPanels, Weight


def _norm_supports(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None = None,
) -> bool:
    if not isinstance(weight, PackedPanels) or not fits(x_TD, weight, bias):
        return False
    return takes(x_TD, norm_weight_D) and (residual_TD is None or takes(x_TD, residual_TD))


@add_norm_linear.provider("native", needs=NEEDS, supported=runs_on, supports=_norm_supports)
def _add_norm_linear(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight: PackedPanels,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, (outputs, inputs) = len(x_TD), weight.shape
    out_TO, normed_TD = x_TD.new_empty(rows, outputs), torch.empty_like(x_TD)
    total_TD = x_TD if residual_TD is None else torch.empty_like(x_TD)
    call(
        "norm_linear", weight.dtype, x_TD, residual_TD, norm_weight_D, normed_TD, total_TD, weight.tensor,
        bias, out_TO, rows, outputs, inputs, eps,
    )  # fmt: skip
    return out_TO, total_TD


def _silu_supports(x_T2F: Tensor, weight: Weight, bias: Tensor | None = None) -> bool:
    return isinstance(weight, PackedPanels) and fits(x_T2F, weight, bias, parts=2)


@silu_and_mul_linear.provider("native", needs=NEEDS, supported=runs_on, supports=_silu_supports)
def _silu_and_mul_linear(x_T2F: Tensor, weight: PackedPanels, bias: Tensor | None = None) -> Tensor:
    rows, (outputs, inputs) = len(x_T2F), weight.shape
    out_TO, gated_TF = x_T2F.new_empty(rows, outputs), x_T2F.new_empty(rows, inputs)
    call("silu_linear", weight.dtype, x_T2F, gated_TF, weight.tensor, bias, out_TO, rows, outputs, inputs)
    return out_TO
