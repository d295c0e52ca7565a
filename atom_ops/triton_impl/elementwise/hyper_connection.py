"""Hyper-connections in Triton.

    _project    a program for a tile of tokens and a share of their N * D features: partial sums of the
                projection and of the squares, to a workspace
    _collapse   a program for a token: sums the shares, makes the mappings, adds the streams. Few tokens have
                a program for each block of features, all of which make the mappings
    _expand     a program for a token and a block of features

The shares depend on N and D alone, so that a token's bits do not depend on the others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.elementwise.hyper_connection import (
    HyperWeights,
    hyper_collapse,
    hyper_expand,
    hyper_head,
)
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_TILE = 16
_FEATURES = 64
_SHARE = 256
"""Features of a program of `_project`, at least."""
_MOST_SHARES = 64
_BLOCK = 1024
_MOST_STREAMS = 16
_FEW = 64
"""Most tokens whose features are divided between programs of `_collapse`."""


@triton.jit(do_not_specialize=["tokens"])
def _project(
    x, projection, sums, squares, tokens, size, share,
    ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens, shares). sums [shares, T, BLOCK_M], squares [shares, T]."""
    pdl_begin(PDL)
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside_T = token_T < tokens
    row_M = tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * share
    stop = tl.minimum(first + share, size)
    sum_TM = tl.zeros((BLOCK_T, BLOCK_M), tl.float32)
    square_T = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(first, stop, BLOCK_F):
        feature_F = start + tl.arange(0, BLOCK_F)
        inside_F = feature_F < stop
        at_TF = token_T.to(tl.int64)[:, None] * size + feature_F[None, :]
        x_TF = tl.load(x + at_TF, mask=inside_T[:, None] & inside_F[None, :], other=0.0).to(tl.float32)
        inside_MF = (row_M < ROWS)[:, None] & inside_F[None, :]
        weight_MF = tl.load(
            projection + row_M[:, None] * size + feature_F[None, :], mask=inside_MF, other=0.0
        )
        sum_TM = tl.dot(x_TF, tl.trans(weight_MF), sum_TM, input_precision=PRECISION)
        square_T += tl.sum(x_TF * x_TF, 1)
    at_T = tl.program_id(1).to(tl.int64) * tokens + token_T
    tl.store(sums + at_T[:, None] * BLOCK_M + row_M[None, :], sum_TM, mask=inside_T[:, None])
    tl.store(squares + at_T, square_T, mask=inside_T)


@triton.jit
def _mapped(sums, base, scale, norm, at_M, inside_M, share_S, inside_S, share_stride):
    """Projected features `at_M`, normalised, scaled and moved; [M]."""
    inside_SM = inside_S[:, None] & inside_M[None, :]
    sum_SM = tl.load(sums + share_S[:, None] * share_stride + at_M[None, :], mask=inside_SM, other=0.0)
    return tl.sum(sum_SM, 0) * norm * tl.load(scale) + tl.load(base + at_M, mask=inside_M, other=0.0)


@triton.jit
def _doubly_stochastic(mix_NN, inside_NN, eps, ITERATIONS: tl.constexpr):
    """Softmax of the rows, then Sinkhorn's iteration; 0 outside."""
    mix_NN = tl.where(inside_NN, mix_NN, float("-inf"))
    mix_NN = tl.exp(mix_NN - tl.max(tl.max(mix_NN, 1), 0))
    # Rows outside have a sum of 0.
    mix_NN = mix_NN / tl.maximum(tl.sum(mix_NN, 1), 1e-37)[:, None]
    mix_NN = tl.where(inside_NN, mix_NN + eps, 0.0)
    mix_NN = mix_NN / (tl.sum(mix_NN, 0) + eps)[None, :]
    for _ in range(ITERATIONS - 1):
        mix_NN = mix_NN / (tl.sum(mix_NN, 1) + eps)[:, None]
        mix_NN = mix_NN / (tl.sum(mix_NN, 0) + eps)[None, :]
    return mix_NN


@triton.jit(do_not_specialize=["tokens"])
def _collapse(
    x, sums, squares, base, scale, out, post, mix, tokens, width, norm_eps, eps, shares,
    STREAMS: tl.constexpr, HEAD: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, 1 or blocks of D). HEAD: without `post` and `mix`."""
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    is_first = tl.program_id(1) == 0
    share_S = tl.arange(0, BLOCK_S)
    inside_S = share_S < shares
    square_S = tl.load(squares + share_S * tokens + token, mask=inside_S, other=0.0)
    norm = tl.rsqrt(tl.sum(square_S, 0) / (STREAMS * width) + norm_eps)
    sums += token * BLOCK_M
    stride = tokens * BLOCK_M
    stream_N = tl.arange(0, BLOCK_N)
    inside_N = stream_N < STREAMS
    pre_N = _mapped(sums, base, scale, norm, stream_N, inside_N, share_S, inside_S, stride)
    pre_N = tl.sigmoid(pre_N) + eps
    if not HEAD:
        at_N = STREAMS + stream_N
        post_N = _mapped(sums, base, scale + 1, norm, at_N, inside_N, share_S, inside_S, stride)
        tl.store(post + token * STREAMS + stream_N, 2.0 * tl.sigmoid(post_N), mask=inside_N & is_first)
        pair_P = tl.arange(0, BLOCK_N * BLOCK_N)
        inside_P = (pair_P // BLOCK_N < STREAMS) & (pair_P % BLOCK_N < STREAMS)
        at_P = pair_P // BLOCK_N * STREAMS + pair_P % BLOCK_N
        mix_P = _mapped(
            sums, base, scale + 2, norm, 2 * STREAMS + at_P, inside_P, share_S, inside_S, stride
        )  # fmt: skip
        mix_NN = tl.reshape(mix_P, (BLOCK_N, BLOCK_N))
        inside_NN = inside_N[:, None] & inside_N[None, :]
        mix_NN = _doubly_stochastic(mix_NN, inside_NN, eps, ITERATIONS)
        at_NN = stream_N[:, None] * STREAMS + stream_N[None, :]
        tl.store(mix + token * STREAMS * STREAMS + at_NN, mix_NN, mask=inside_NN & is_first)
    x += token * STREAMS * width
    for start in range(tl.program_id(1) * BLOCK_D, width, BLOCK_D * tl.num_programs(1)):
        feature_D = start + tl.arange(0, BLOCK_D)
        inside_ND = inside_N[:, None] & (feature_D < width)[None, :]
        x_ND = tl.load(x + stream_N[:, None] * width + feature_D[None, :], mask=inside_ND, other=0.0)
        sum_D = tl.sum(x_ND.to(tl.float32) * pre_N[:, None], 0)
        tl.store(out + token * width + feature_D, sum_D, mask=feature_D < width)


@triton.jit
def _expand(
    out, x, post, mix, new, width,
    STREAMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks of D)."""
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    feature_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_D = feature_D < width
    stream_N = tl.arange(0, BLOCK_N)
    inside_N = stream_N < STREAMS
    out_D = tl.load(out + token * width + feature_D, mask=inside_D, other=0.0).to(tl.float32)
    post_N = tl.load(post + token * STREAMS + stream_N, mask=inside_N, other=0.0)
    new_ND = post_N[:, None] * out_D[None, :]
    x += token * STREAMS * width
    mix += token * STREAMS * STREAMS
    for stream in tl.static_range(STREAMS):
        x_D = tl.load(x + stream * width + feature_D, mask=inside_D, other=0.0).to(tl.float32)
        mix_N = tl.load(mix + stream * STREAMS + stream_N, mask=inside_N, other=0.0)
        new_ND += mix_N[:, None] * x_D[None, :]
    at_ND = (token * STREAMS + stream_N)[:, None] * width + feature_D[None, :]
    tl.store(new + at_ND, new_ND, mask=inside_N[:, None] & inside_D[None, :])


def _supports(streams_TND: Tensor, weights: HyperWeights) -> bool:
    return streams_TND.is_floating_point() and streams_TND.shape[1] <= _MOST_STREAMS


def _precision(dtype: torch.dtype) -> str:
    """How tensor cores multiply by float32 weights; NVIDIA's have no float32 products.

    A number of 16 bits is one of TF32: then three products with parts of the weight lose no more than
    rounding to float32 does.
    """
    return "ieee" if torch.version.hip is not None or dtype.itemsize > 2 else "tf32x3"


def _launch(
    streams_TND: Tensor, weights: HyperWeights, post_TN: Tensor, mix_TNN: Tensor, head: bool
) -> Tensor:
    """The weighted sum; `post_TN` and `mix_TNN` are filled unless it is that of the model's head."""
    streams_TND = streams_TND.contiguous()
    tokens, streams, width = streams_TND.shape
    out_TD = streams_TND.new_empty(tokens, width)
    if not tokens:
        return out_TD
    size = streams * width
    rows = len(weights.base_M)
    block_m = max(triton.next_power_of_2(rows), 16)
    shares = min(triton.cdiv(size, _SHARE), _MOST_SHARES)
    share = triton.cdiv(triton.cdiv(size, shares), _FEATURES) * _FEATURES
    shares = triton.cdiv(size, share)
    sums = streams_TND.new_empty(shares, tokens, block_m, dtype=torch.float32)
    squares = streams_TND.new_empty(shares, tokens, dtype=torch.float32)
    block_d = min(triton.next_power_of_2(width), _BLOCK)
    parts = triton.cdiv(width, block_d) if tokens <= _FEW else 1
    options = launch_options(streams_TND.device)
    _project[(triton.cdiv(tokens, _TILE), shares)](
        streams_TND, weights.projection_MF, sums, squares, tokens, size, share,
        ROWS=rows, BLOCK_T=_TILE, BLOCK_M=block_m, BLOCK_F=_FEATURES,
        PRECISION=_precision(streams_TND.dtype), num_warps=4, **options,
    )  # fmt: skip
    _collapse[(tokens, parts)](
        streams_TND, sums, squares, weights.base_M, weights.scale_S, out_TD, post_TN, mix_TNN, tokens, width,
        weights.norm_eps, weights.eps, shares,
        STREAMS=streams, HEAD=head, ITERATIONS=weights.iterations, BLOCK_M=block_m,
        BLOCK_N=triton.next_power_of_2(streams), BLOCK_D=block_d,
        BLOCK_S=triton.next_power_of_2(shares), num_warps=4, **options,
    )  # fmt: skip
    return out_TD


@hyper_collapse.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _hyper_collapse(streams_TND: Tensor, weights: HyperWeights) -> tuple[Tensor, Tensor, Tensor]:
    tokens, streams, _ = streams_TND.shape
    post_TN = streams_TND.new_empty(tokens, streams, dtype=torch.float32)
    mix_TNN = streams_TND.new_empty(tokens, streams, streams, dtype=torch.float32)
    return _launch(streams_TND, weights, post_TN, mix_TNN, head=False), post_TN, mix_TNN


@hyper_head.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _hyper_head(streams_TND: Tensor, weights: HyperWeights) -> Tensor:
    unused = weights.base_M  # pointers that the kernel does not follow
    return _launch(streams_TND, weights, unused, unused, head=True)


@hyper_expand.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda out_TD, streams_TND, post_TN, mix_TNN: streams_TND.shape[1] <= _MOST_STREAMS,
)
def _hyper_expand(out_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, mix_TNN: Tensor) -> Tensor:
    streams_TND = streams_TND.contiguous()
    tokens, streams, width = streams_TND.shape
    new_TND = torch.empty_like(streams_TND)
    block = min(triton.next_power_of_2(width), _BLOCK)
    if tokens:
        _expand[(tokens, triton.cdiv(width, block))](
            out_TD.contiguous(), streams_TND, post_TN, mix_TNN, new_TND, width,
            STREAMS=streams, BLOCK_N=triton.next_power_of_2(streams), BLOCK_D=block, num_warps=4,
            **launch_options(streams_TND.device),
        )  # fmt: skip
    return new_TND
