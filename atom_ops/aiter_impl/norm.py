"""RMS norm, alone and with a residual."""

import torch
from torch import Tensor

from atom_ops.aiter_impl import NEEDS, runs_on, takes
from atom_ops.ops.elementwise.norm import add_rms_norm, rms_norm

MOST_FEATURES = 8192


def _rows(x_TD: Tensor) -> Tensor:
    """The kernels read contiguous rows."""
    return x_TD.reshape(-1, x_TD.shape[-1]).contiguous()


@rms_norm.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_TD, weight_D, eps: takes(x_TD, weight_D) and x_TD.shape[-1] <= MOST_FEATURES,
    batch_invariant=False,
)
def _rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    import aiter

    out: Tensor = aiter.rms_norm(input=_rows(x_TD), weight=weight_D, epsilon=eps)
    return out.view(x_TD.shape)


@add_rms_norm.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_TD, residual_TD, weight_D, eps, x_weight_D=None: (
        weight_D is not None
        and x_weight_D is None
        and takes(x_TD, residual_TD, weight_D)
        and x_TD.shape[-1] <= MOST_FEATURES
    ),
    batch_invariant=False,
)
def _add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor | None, eps: float, x_weight_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    import aiter

    rows = _rows(x_TD)
    out = torch.empty_like(rows)
    total = torch.empty_like(rows)
    aiter.rmsnorm2d_fwd_with_add(
        out=out,
        input=rows,
        residual_in=_rows(residual_TD),
        residual_out=total,
        weight=weight_D,
        epsilon=eps,
    )
    return out.view(x_TD.shape), total.view(x_TD.shape)
