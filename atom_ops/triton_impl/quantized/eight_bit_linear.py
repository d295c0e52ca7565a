"""GEMM of 8-bit weights and 8-bit activations: e4m3 or int8, on tensor cores.

    out[t, o] = x_scale[t] * sum over blocks b of inputs (scale[o, b] * (x[t, b] · w[o, b]))

A product of one iteration is added in float32, because the tensor cores of Hopper keep fewer digits
of e4m3 sums. Integers are summed exactly. With split-K a second launch adds the splits in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.hardware.pdl import (
    fetched_columns,
    launch_options,
    pdl_begin,
    pdl_launch_dependents,
    pdl_wait,
    prefetch_rows,
)
from atom_ops.triton_impl.quantized.quantized_plans import GemmPlan
from atom_ops.triton_impl.quantized.rounded_rows import RoundedRows
from atom_ops.weights import BlockFP8, ChannelFP8, ChannelINT8

_ADDED_AT_ONCE = 512


@triton.jit(do_not_specialize=["tokens", "padded"])
def _gemm(
    x, x_scales, weight, scales, bias, out, tokens, padded, outputs, inputs, share, blocks, fetched,
    BLOCK_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
    FETCH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, splits); BLOCK_ROWS: outputs of a block of scales, 0: a scale for each output.

    `fetched`: columns of a program's weights that it reads into the L2 cache before the previous kernel ends.
    """
    tiles = padded // TOKENS
    first_o = tl.program_id(0) // tiles * ROWS
    split = tl.program_id(1)
    output_R = first_o + tl.arange(0, ROWS)
    token_T = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    column_C = tl.arange(0, COLUMNS)
    inside_R = output_R < outputs
    first = split * share
    weight_RC = weight + output_R.to(tl.int64)[:, None] * inputs + column_C[None, :] + first
    x_CT = x + token_T.to(tl.int64)[None, :] * inputs + column_C[:, None] + first
    exact: tl.constexpr = weight.dtype.element_ty == tl.int8
    total_RT = tl.zeros((ROWS, TOKENS), tl.int32 if exact else tl.float32)
    if WHOLE:
        pdl_launch_dependents(PDL)
    if FETCH:
        prefetch_rows(weight + first_o.to(tl.int64) * inputs + first, ROWS, inputs, fetched, PDL)
    pdl_wait(PDL)
    for start in range(0, share, COLUMNS):
        if EVEN:
            tile_RC = tl.load(weight_RC + start)
            tile_CT = tl.load(x_CT + start)
        else:
            valid_C = column_C < inputs - first - start
            tile_RC = tl.load(weight_RC + start, mask=inside_R[:, None] & valid_C[None, :], other=0.0)
            tile_CT = tl.load(x_CT + start, mask=valid_C[:, None] & (token_T >= 0)[None, :], other=0.0)
        if exact:
            total_RT = tl.dot(tile_RC, tile_CT, total_RT, out_dtype=tl.int32)
        elif BLOCK_ROWS:
            at = first_o // BLOCK_ROWS * blocks + (first + start) // COLUMNS
            scale = tl.load(scales + at, mask=first + start < inputs, other=0.0)
            total_RT += tl.dot(tile_RC, tile_CT) * scale
        else:
            total_RT += tl.dot(tile_RC, tile_CT)
    if not WHOLE:
        pdl_launch_dependents(PDL)
    real_T = token_T < tokens
    inside_RT = inside_R[:, None] & real_T[None, :]
    if SPLIT:
        place_RT = (split * tokens + token_T).to(tl.int64)[None, :] * outputs + output_R[:, None]
        tl.store(out + place_RT, total_RT, mask=inside_RT)
    else:
        place_RT = token_T.to(tl.int64)[None, :] * outputs + output_R[:, None]
        x_scale_T = tl.load(x_scales + token_T, mask=real_T, other=0.0)
        total_RT = total_RT.to(tl.float32) * x_scale_T[None, :]
        if BLOCK_ROWS == 0:
            total_RT *= tl.load(scales + output_R, mask=inside_R, other=0.0)[:, None]
        if HAS_BIAS:
            total_RT += tl.load(bias + output_R, mask=inside_R, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place_RT, total_RT.to(out.dtype.element_ty), mask=inside_RT)


@triton.jit
def _reduce_split_k(
    partials, x_scales, scales, bias, out, size, outputs,
    SPLIT_K: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    output = place % outputs
    total = tl.zeros((BLOCK,), partials.dtype.element_ty)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(partials + split * size + place, mask=inside, other=0.0)
    wide = total.to(tl.float32) * tl.load(x_scales + place // outputs, mask=inside, other=0.0)
    if HAS_SCALE:
        wide *= tl.load(scales + output, mask=inside, other=0.0)
    if HAS_BIAS:
        wide += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, wide.to(out.dtype.element_ty), mask=inside)


def multiply(
    plan: GemmPlan,
    rows: RoundedRows,
    tokens: int,
    weight: BlockFP8 | ChannelFP8 | ChannelINT8,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[T, O] in `dtype`; `rows` were made with `plan.tile` and a scale for each token."""
    (outputs, inputs), x_TI, x_scales = weight.shape, rows.values, rows.scales
    block_rows, blocks = 0, 0
    if isinstance(weight, BlockFP8):
        block_rows = weight.block[0]
        blocks = weight.scales.shape[1]
    share = triton.cdiv(inputs, plan.split_k * plan.columns) * plan.columns
    split_k = triton.cdiv(inputs, share)
    options = launch_options(x_TI.device)
    out_TO = torch.empty(tokens, outputs, dtype=dtype, device=x_TI.device)
    partials = out_TO
    if split_k > 1:
        exact = weight.values.dtype == torch.int8
        kind = torch.int32 if exact else torch.float32
        partials = torch.empty(split_k, tokens, outputs, dtype=kind, device=x_TI.device)
    even = outputs % plan.rows == 0 and inputs % (split_k * plan.columns) == 0
    fetched = min(fetched_columns(weight.values) // (split_k * plan.columns) * plan.columns, share)
    _gemm[(triton.cdiv(outputs, plan.rows) * (len(x_TI) // plan.tile), split_k)](
        x_TI, x_scales, weight.values, weight.scales, bias, partials,
        tokens, len(x_TI), outputs, inputs, share, blocks, fetched,
        BLOCK_ROWS=block_rows, HAS_BIAS=bias is not None,
        EVEN=even, SPLIT=split_k > 1, FETCH=even and fetched > 0, WHOLE=even and fetched == share,
        ROWS=plan.rows, COLUMNS=plan.columns, TOKENS=plan.tile, num_warps=plan.warps,
        num_stages=plan.stages, **options,
    )  # fmt: skip
    if split_k > 1:
        size = tokens * outputs
        _reduce_split_k[(triton.cdiv(size, _ADDED_AT_ONCE),)](
            partials, x_scales, weight.scales, bias, out_TO, size, outputs,
            SPLIT_K=split_k, HAS_SCALE=block_rows == 0, HAS_BIAS=bias is not None, BLOCK=_ADDED_AT_ONCE,
            **options,
        )  # fmt: skip
    return out_TO
