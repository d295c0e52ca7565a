"""Linear layer (GEMM), with a weight that may be packed for the device beforehand."""

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op
from atom_ops.tolerances import REDUCTION


def _case(
    tokens: int, inputs: int, outputs: int, with_bias: bool, out_dtype: torch.dtype | None = None
) -> Case:
    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype | None]:
        x = torch.randn(tokens, inputs, generator=generator).to(dtype)
        weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
        bias = torch.randn(outputs, generator=generator).to(dtype) if with_bias else None
        return x, weight, bias, out_dtype

    options = f"{'+bias' if with_bias else ''}{'->float32' if out_dtype else ''}"
    return Case(f"{tokens}x{inputs}x{outputs}{options}", make)


@op(
    [
        _case(1, 576, 960, False),
        _case(1, 70, 49, True),
        _case(5, 64, 49, True),
        _case(7, 1000, 72, True),
        _case(16, 1024, 4096, False),
        _case(70, 128, 256, True),
        _case(1, 576, 160, False, torch.float32),
        _case(6, 64, 49, True, torch.float32),
        _case(130, 64, 200, False, torch.float32),
    ],
    REDUCTION,
)
def linear(
    x_TI: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x @ weightᵀ + bias, [T, I] -> [T, O]; `weight` [O, I] as `pack_linear_weight` returned it.

    The result has `out_dtype`, by default x's dtype. On a GPU a float32 result is not rounded to
    x's dtype on the way.
    """
    if out_dtype in (None, x_TI.dtype):
        return functional.linear(x_TI, weight, bias)
    if out_dtype == torch.float32 and x_TI.is_cuda:
        out_TO = torch.mm(x_TI, weight.t(), out_dtype=torch.float32)
        return out_TO if bias is None else out_TO + bias
    return functional.linear(x_TI, weight, bias).to(out_dtype)


@linear.provider("blas", needs="a GPU", supported=lambda device: device.type == "cuda", batch_invariant=False)
def _blas(
    x_TI: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The vendor's GEMM library (cuBLAS, hipBLASLt) through torch; the fastest for many tokens."""
    return linear.reference(x_TI, weight, bias, out_dtype)


BATCH_INVARIANT = "batch_invariant"
"""The provider whose rows do not depend on the batch; used only with `batch_invariant`."""
_ONEDNN = "onednn_packed"
_ROWS_HINT = 16  # a layout that serves 4 to 256 rows best and costs single rows little


def pack_linear_weight(weight_OI: Tensor) -> Tensor:
    """The weight in the layout that is fastest for `linear`, and readable only by it.

    Call after `backend.resolve`. Returns the same tensor where no other layout is faster.
    """
    if _ONEDNN not in linear.order or not _onednn_packs(weight_OI.dtype):
        return weight_OI
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _ROWS_HINT)
    return packed


def _onednn_packs(dtype: torch.dtype) -> bool:
    """Half precisions need the processor's own instructions for them."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


@linear.provider(
    _ONEDNN,
    needs="a CPU and torch built with oneDNN",
    supported=lambda device: device.type == "cpu" and torch.backends.mkldnn.is_available(),
    supports=lambda x_TI, weight, bias=None, out_dtype=None: weight.is_mkldnn,
    prepare=lambda x_TI, weight, bias=None, out_dtype=None: (
        x_TI,
        pack_linear_weight(weight),
        bias,
        out_dtype,
    ),
    batch_invariant=False,
)
def _onednn_packed(
    x_TI: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight, bias, "none", [], "")
    return out_TO if out_dtype is None else out_TO.to(out_dtype)
