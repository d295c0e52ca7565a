"""The second launch of a GEMM with split-K: adds the splits' sums, always in the same order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin

_ADDED_AT_ONCE = 512


@triton.jit
def store_outputs(total, bias, out, place, output, inside, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _reduce_split_k(
    partials, bias, out, size, outputs,
    SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(partials + split * size + place, mask=inside, other=0.0)
    store_outputs(total, bias, out, place, place % outputs, inside, HAS_BIAS)


def partials_of(out_TO: Tensor, split_k: int) -> Tensor:
    """Memory for the splits' sums, float32 [split_k, T, O]; without splits `out_TO` itself."""
    if split_k == 1:
        return out_TO
    return torch.empty(split_k, *out_TO.shape, dtype=torch.float32, device=out_TO.device)


def reduce_partials(sums: Tensor, bias: Tensor | None, out_TO: Tensor) -> Tensor:
    """Fill `out_TO` with the sum of `sums` [split_k, T, O] and the bias."""
    size = out_TO.numel()
    outputs = out_TO.shape[1]
    _reduce_split_k[(triton.cdiv(size, _ADDED_AT_ONCE),)](
        sums, bias, out_TO, size, outputs,
        SPLIT_K=len(sums), HAS_BIAS=bias is not None, BLOCK=_ADDED_AT_ONCE, **launch_options(out_TO.device),
    )  # fmt: skip
    return out_TO
