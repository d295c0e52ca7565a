"""The merge of the ranks' partial attention, in one launch.

A program merges the results of all ranks for one head of one token, weighted by their log-sum-exps.
"""

import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.partial_attention import merge_partials
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

# The largest log-sum-exp of ranks without tokens: finite, because inf - inf would be NaN.
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _merge(
    partials, lse, out, heads, rank_stride, token_stride, head_stride,
    lse_rank_stride, lse_token_stride, lse_head_stride,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T x H): only the first dimension takes more than 65,535 programs."""
    pdl_begin(PDL)
    head = tl.program_id(0) % heads
    token = (tl.program_id(0) // heads).to(tl.int64)
    rank_R = tl.arange(0, BLOCK_R)
    feature_C = tl.arange(0, BLOCK_C)
    lse_R = lse + rank_R.to(tl.int64) * lse_rank_stride + token * lse_token_stride + head * lse_head_stride
    lse_R = tl.load(lse_R, mask=rank_R < RANKS, other=float("-inf"))
    weight_R = tl.exp(lse_R - tl.maximum(tl.max(lse_R, 0), _LOWEST))
    total = tl.sum(weight_R, 0)
    wanted_RC = (rank_R < RANKS)[:, None] & (feature_C < WIDTH)[None, :]
    partial_R = partials + rank_R.to(tl.int64) * rank_stride + token * token_stride + head * head_stride
    partial_RC = tl.load(partial_R[:, None] + feature_C[None, :], mask=wanted_RC, other=0.0).to(tl.float32)
    merged_C = tl.sum(partial_RC * weight_R[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    out_C = out + (token * heads + head) * WIDTH + feature_C
    tl.store(out_C, merged_C.to(out.dtype.element_ty), mask=feature_C < WIDTH)


def _supports(out_RTHC: Tensor, lse_RTH: Tensor) -> bool:
    ranks, _, _, width = out_RTHC.shape
    return out_RTHC.stride(3) == 1 and ranks * triton.next_power_of_2(width) <= 1 << 15


@merge_partials.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _merge_partials(out_RTHC: Tensor, lse_RTH: Tensor) -> Tensor:
    ranks, tokens, heads, width = out_RTHC.shape
    out_THC = out_RTHC.new_empty(tokens, heads, width)
    if tokens:
        _merge[(tokens * heads,)](
            out_RTHC, lse_RTH, out_THC, heads, *out_RTHC.stride()[:3], *lse_RTH.stride(),
            WIDTH=width, RANKS=ranks, BLOCK_R=triton.next_power_of_2(ranks),
            BLOCK_C=triton.next_power_of_2(width), num_warps=4, **launch_options(out_RTHC.device),
        )  # fmt: skip
    return out_THC
