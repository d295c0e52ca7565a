"""GEMM of plain weights, where AITER chooses hipBLASLt, its own assembly or torch by its tables of tuned
shapes, and of quantized ones."""

import torch
from torch import Tensor

from atom_ops.aiter_impl import NEEDS, mxfp4, quantized_linear, runs_on, takes, takes_dtype
from atom_ops.aiter_impl.quantized_linear import EightBits
from atom_ops.ops.linear.linear import linear
from atom_ops.weights import MXFP4, ShuffledMXFP4, Weight


def _pack(weight: Weight) -> Weight | None:
    return quantized_linear.pack(weight) or mxfp4.pack(weight)


def _supports(
    x_TI: Tensor, weight: Weight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> bool:
    if isinstance(weight, Tensor):
        return takes(x_TI, weight) and out_dtype in (None, x_TI.dtype)
    return takes_dtype(x_TI.dtype) and (isinstance(weight, ShuffledMXFP4) or quantized_linear.reads(weight))


def _prepare(
    x_TI: Tensor, weight: Weight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Weight, Tensor | None, torch.dtype | None]:
    return x_TI, _pack(weight) or weight, bias, out_dtype


@linear.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=_supports,
    prepare=_prepare,
    pack=_pack,
    batch_invariant=False,
    quantizes_activations=True,
)
def _multiply(
    x_TI: Tensor,
    weight: Tensor | EightBits | ShuffledMXFP4,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    if isinstance(weight, ShuffledMXFP4):
        return mxfp4.multiply(x_TI, weight, bias, out_dtype)
    if not isinstance(weight, Tensor):
        return quantized_linear.multiply(x_TI, weight, bias, out_dtype)
    from aiter.tuned_gemm import tgemm

    out_TO: Tensor = tgemm.mm(inp=x_TI.contiguous(), weights=weight, bias=bias)
    return out_TO


@linear.provider(
    "aiter_triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_TI, weight, bias=None, out_dtype=None: (
        isinstance(weight, MXFP4) and takes_dtype(x_TI.dtype) and mxfp4.reads(weight)
    ),
    pack=lambda weight: weight if isinstance(weight, MXFP4) and mxfp4.reads(weight) else None,
    batch_invariant=False,
    quantizes_activations=True,
)
def _triton(
    x_TI: Tensor, weight: MXFP4, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """MXFP4 by Triton, from weights as the checkpoint stores them."""
    return mxfp4.multiply_plain(x_TI, weight, bias, out_dtype)
