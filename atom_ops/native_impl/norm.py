"""RMS norm, alone and with a residual."""

import torch
from torch import Tensor

from atom_ops.native_impl import NEEDS, call, runs_on, takes
from atom_ops.ops.elementwise.norm import add_rms_norm, rms_norm


@rms_norm.provider(
    "native",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_TD, weight_D, eps: takes(x_TD, weight_D),
)
def _rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    out_TD = torch.empty_like(x_TD)
    size = x_TD.shape[-1]
    call("rms_norm", x_TD.dtype, x_TD, None, weight_D, None, out_TD, None, x_TD.numel() // size, size, eps)
    return out_TD


@add_rms_norm.provider(
    "native",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_TD, residual_TD, weight_D, eps, x_weight_D=None: takes(
        x_TD, residual_TD, *(weight for weight in (weight_D, x_weight_D) if weight is not None)
    ),
)
def _add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor | None, eps: float, x_weight_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    total_TD = torch.empty_like(x_TD)
    out_TD = total_TD if weight_D is None else torch.empty_like(x_TD)
    size = x_TD.shape[-1]
    rows = x_TD.numel() // size
    call("rms_norm", x_TD.dtype, x_TD, residual_TD, weight_D, x_weight_D, out_TD, total_TD, rows, size, eps)
    return out_TD, total_TD
