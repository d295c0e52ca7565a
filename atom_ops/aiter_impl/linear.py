"""GEMM of plain weights: AITER chooses hipBLASLt, its own assembly or torch by its tables of tuned shapes."""

import torch
from torch import Tensor

from atom_ops.aiter_impl import NEEDS, runs_on, takes
from atom_ops.ops.linear import linear
from atom_ops.weights import Weight


def _supports(
    x_TI: Tensor, weight: Weight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> bool:
    return isinstance(weight, Tensor) and takes(x_TI, weight) and out_dtype in (None, x_TI.dtype)


@linear.provider("aiter", needs=NEEDS, supported=runs_on, supports=_supports, batch_invariant=False)
def _tuned(
    x_TI: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    from aiter.tuned_gemm import tgemm

    out_TO: Tensor = tgemm.mm(inp=x_TI.contiguous(), weights=weight, bias=bias)
    return out_TO
