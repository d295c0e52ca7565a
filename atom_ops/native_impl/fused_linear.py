"""Linear layers with the norm or the activation before them, in one call.

The kernels are those of the separate ops: the bits are the same.
"""

import torch
from torch import Tensor

from atom_ops.native_impl import NEEDS, call, linear_ints, runs_on, takes
from atom_ops.native_impl.linear import fits
from atom_ops.ops.linear.fused_linear import add_norm_linear, silu_and_mul_linear
from atom_ops.weights import PackedInts, PackedPanels, Weight


def _norm_supports(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None = None,
) -> bool:
    if not isinstance(weight, PackedPanels | PackedInts) or not fits(x_TD, weight, bias):
        return False
    return takes(x_TD, norm_weight_D) and (residual_TD is None or takes(x_TD, residual_TD))


@add_norm_linear.provider(
    "native", needs=NEEDS, supported=runs_on, supports=_norm_supports, quantizes_activations=True
)
def _add_norm_linear(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight: PackedPanels | PackedInts,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows = x_TD.shape[0]
    outputs, inputs = weight.shape
    out_TO = x_TD.new_empty(rows, outputs)
    normed_TD = torch.empty_like(x_TD)
    total_TD = x_TD if residual_TD is None else torch.empty_like(x_TD)
    norm = x_TD, residual_TD, norm_weight_D, normed_TD, total_TD
    if isinstance(weight, PackedInts):
        own = linear_ints.tensors(weight)
        call(
            "norm_linear_ints", x_TD.dtype, *norm, *own, bias, out_TO, rows, *linear_ints.numbers(weight), eps
        )
    else:
        call("norm_linear", x_TD.dtype, *norm, weight.tensor, bias, out_TO, rows, outputs, inputs, eps)
    return out_TO, total_TD


def _silu_supports(x_T2F: Tensor, weight: Weight, bias: Tensor | None = None) -> bool:
    return isinstance(weight, PackedPanels | PackedInts) and fits(x_T2F, weight, bias, parts=2)


@silu_and_mul_linear.provider(
    "native", needs=NEEDS, supported=runs_on, supports=_silu_supports, quantizes_activations=True
)
def _silu_and_mul_linear(
    x_T2F: Tensor, weight: PackedPanels | PackedInts, bias: Tensor | None = None
) -> Tensor:
    rows = x_T2F.shape[0]
    outputs, inputs = weight.shape
    out_TO, gated_TF = x_T2F.new_empty(rows, outputs), x_T2F.new_empty(rows, inputs)
    if isinstance(weight, PackedInts):
        own = linear_ints.tensors(weight)
        numbers = linear_ints.numbers(weight)
        call("silu_linear_ints", x_T2F.dtype, x_T2F, gated_TF, *own, bias, out_TO, rows, *numbers)
    else:
        tensors = x_T2F, gated_TF, weight.tensor, bias, out_TO
        call("silu_linear", x_T2F.dtype, *tensors, rows, outputs, inputs)
    return out_TO
