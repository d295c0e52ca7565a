"""Gated activations."""

from torch import Tensor

from atom_ops.aiter_impl import NEEDS, runs_on, takes
from atom_ops.ops.elementwise.activation import silu_and_mul

_VECTOR = 16
"""The kernel reads a row in vectors of at most so many features."""


@silu_and_mul.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_T2F: takes(x_T2F) and x_T2F.shape[-1] % (2 * _VECTOR) == 0,
)
def _silu_and_mul(x_T2F: Tensor) -> Tensor:
    import aiter

    out_TF = x_T2F.new_empty(*x_T2F.shape[:-1], x_T2F.shape[-1] // 2)
    aiter.silu_and_mul(out=out_TF, input=x_T2F.contiguous())
    return out_TF
