"""RMS norms of queries and keys over all heads.

One of several ranks sums a token's squares in one program; after the all-reduce, programs normalise blocks of
features. One rank alone has whole rows: for each token a program normalises the queries, one normalises the
keys, and one copies the values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.wide_norms import normalised_queries_keys, query_key_squares
from atom_ops.triton_impl.elementwise.norm import norm_warps, normed_row
from atom_ops.triton_impl.hardware.pdl import (
    launch_options,
    pdl_begin,
    pdl_launch_dependents,
    pdl_wait,
)
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_MOST_FEATURES = 1 << 20
_MOST_IN_A_ROW = 16384
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


@triton.jit
def _normalise_row(x_ptr, weight_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copies without a weight."""
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + column, mask=inside, other=0.0)
    if weight_ptr is not None:
        x = normed_row(x, tl.load(weight_ptr + column, mask=inside, other=0.0), eps, SIZE)
    tl.store(out_ptr + column, x, mask=inside)


@triton.jit
def _normalise_whole_rows(
    x_ptr, query_weight_ptr, key_weight_ptr, out_ptr, stride, eps,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, 3)."""
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    x_ptr += row * stride
    out_ptr += row * (QUERIES + KEYS + VALUES)
    if part == 0:
        _normalise_row(x_ptr, query_weight_ptr, out_ptr, eps, QUERIES, BLOCK)
    elif part == 1:
        _normalise_row(x_ptr + QUERIES, key_weight_ptr, out_ptr + QUERIES, eps, KEYS, BLOCK)
    else:
        _normalise_row(x_ptr + QUERIES + KEYS, None, out_ptr + QUERIES + KEYS, eps, VALUES, BLOCK)


def _parts(qkv_TO: Tensor, query_weight_Q: Tensor, key_weight_K: Tensor) -> tuple[int, int, int]:
    """Features of queries, keys and values."""
    queries, keys = len(query_weight_Q), len(key_weight_K)
    return queries, keys, qkv_TO.shape[1] - queries - keys


def _supports_normalised(
    qkv_TO: Tensor,
    squares_T2: Tensor | None,
    query_weight_Q: Tensor,
    key_weight_K: Tensor,
    all_queries: int,
    all_keys: int,
    eps: float,
) -> bool:
    if not _supports(qkv_TO):
        return False
    if squares_T2 is None:
        return max(_parts(qkv_TO, query_weight_Q, key_weight_K)) <= _MOST_IN_A_ROW
    return squares_T2.is_contiguous()


@normalised_queries_keys.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports_normalised)
def _normalised_queries_keys(
    qkv_TO: Tensor,
    squares_T2: Tensor | None,
    query_weight_Q: Tensor,
    key_weight_K: Tensor,
    all_queries: int,
    all_keys: int,
    eps: float,
) -> Tensor:
    tokens, features = qkv_TO.shape
    out_TO = torch.empty(tokens, features, dtype=qkv_TO.dtype, device=qkv_TO.device)
    if not tokens:
        return out_TO
    if squares_T2 is None:
        queries, keys, values = _parts(qkv_TO, query_weight_Q, key_weight_K)
        block = triton.next_power_of_2(max(queries, keys, values))
        _normalise_whole_rows[(tokens, 3)](
            qkv_TO, query_weight_Q, key_weight_K, out_TO, qkv_TO.stride(0), eps,
            QUERIES=queries, KEYS=keys, VALUES=values, BLOCK=block, num_warps=norm_warps(block),
            **launch_options(qkv_TO.device),
        )  # fmt: skip
    else:
        _normalise_rows[(tokens, triton.cdiv(features, _BLOCK))](
            qkv_TO, squares_T2, query_weight_Q, key_weight_K, out_TO, qkv_TO.stride(0),
            len(query_weight_Q), len(key_weight_K), features, all_queries, all_keys, eps,
            BLOCK=_BLOCK, num_warps=_WARPS, **launch_options(qkv_TO.device),
        )  # fmt: skip
    return out_TO
