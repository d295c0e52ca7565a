"""RMS norms of queries and keys over all heads: one program for each token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.wide_norms import normalised_queries_keys, query_key_squares
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_MOST_FEATURES = 1 << 20
_BLOCK = 1024
_WARPS = 4


@triton.jit
def _sum_of_squares(x_ptr, first, end, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(first, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < end, other=0.0).to(tl.float32)
        total += x * x
    return tl.sum(total, axis=0)


@triton.jit
def _square_rows(
    x_ptr, out_ptr, stride, queries, keys, repeated, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    tl.store(out_ptr + row * 2, _sum_of_squares(x_ptr, 0, queries, BLOCK))
    tl.store(out_ptr + row * 2 + 1, _sum_of_squares(x_ptr, queries + repeated, queries + keys, BLOCK))


def _supports(qkv_TO: Tensor) -> bool:
    return qkv_TO.is_floating_point() and qkv_TO.stride(1) == 1 and qkv_TO.shape[1] <= _MOST_FEATURES


@query_key_squares.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda qkv_TO, queries, keys, repeated: _supports(qkv_TO),
)
def _query_key_squares(qkv_TO: Tensor, queries: int, keys: int, repeated: int) -> Tensor:
    out_T2 = torch.empty(len(qkv_TO), 2, dtype=torch.float32, device=qkv_TO.device)
    if len(qkv_TO):
        _square_rows[(len(qkv_TO),)](
            qkv_TO, out_T2, qkv_TO.stride(0), queries, keys, repeated,
            BLOCK=_BLOCK, num_warps=_WARPS, **launch_options(qkv_TO.device),
        )  # fmt: skip
    return out_T2


@triton.jit
def _normalise_rows(
    x_ptr, squares_ptr, query_weight_ptr, key_weight_ptr, out_ptr, stride, queries, keys, features,
    all_queries, all_keys, eps, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(PDL)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_query = column < queries
    is_key = (column >= queries) & (column < queries + keys)
    weight = tl.load(query_weight_ptr + column, mask=is_query, other=1.0).to(tl.float32)
    key_weight = tl.load(key_weight_ptr + column - queries, mask=is_key, other=1.0).to(tl.float32)
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    q_scale = tl.rsqrt(tl.load(squares_ptr + row * 2) / all_queries + eps)
    k_scale = tl.rsqrt(tl.load(squares_ptr + row * 2 + 1) / all_keys + eps)
    inside = column < features
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.where(is_query, q_scale, tl.where(is_key, k_scale, 1.0))
    tl.store(out_ptr + row * features + column, x * scale * weight * key_weight, mask=inside)


@normalised_queries_keys.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda qkv_TO, squares_T2, query_weight_Q, key_weight_K, all_queries, all_keys, eps: (
        _supports(qkv_TO) and squares_T2.is_contiguous()
    ),
)
def _normalised_queries_keys(
    qkv_TO: Tensor,
    squares_T2: Tensor,
    query_weight_Q: Tensor,
    key_weight_K: Tensor,
    all_queries: int,
    all_keys: int,
    eps: float,
) -> Tensor:
    tokens, features = qkv_TO.shape
    out_TO = torch.empty(tokens, features, dtype=qkv_TO.dtype, device=qkv_TO.device)
    if tokens:
        _normalise_rows[(tokens, triton.cdiv(features, _BLOCK))](
            qkv_TO, squares_T2, query_weight_Q, key_weight_K, out_TO, qkv_TO.stride(0),
            len(query_weight_Q), len(key_weight_K), features, all_queries, all_keys, eps,
            BLOCK=_BLOCK, num_warps=_WARPS, **launch_options(qkv_TO.device),
        )  # fmt: skip
    return out_TO
