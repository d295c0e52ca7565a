"""GEMM of 4-bit weights (`FourBitWords`) and plain activations: codes are decoded in registers.

A program has 4 warps: with two warpgroups Triton 3.6 gives wrong results on Hopper for some tiles. For many
tokens the whole weight is decoded first, by a kernel of its own, for the vendor's GEMM.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.hardware.pdl import (
    fits_cache,
    launch_options,
    pdl_begin,
    pdl_launch_dependents,
    pdl_wait,
    prefetch_rows,
)
from atom_ops.triton_impl.linear.split_k import partials_of, reduce_partials
from atom_ops.triton_impl.quantized.four_bit import COLUMNS, decode_words, join_quarters, settings_of
from atom_ops.triton_impl.quantized.quantized_plans import GemmPlan
from atom_ops.weights import FourBitWords

_DECODED_ROWS = 4
_DECODED_CHUNKS = 8


@triton.jit
def _chunks_of(
    words_RW, scales, zeros, row_R, inside_R, chunk, chunks, groups, dtype: tl.constexpr,
    GROUP: tl.constexpr, PTX: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The four quarters of CHUNKS chunks of some rows, from their words [R, CHUNKS * 32]."""
    chunk_C = chunk + tl.arange(0, CHUNKS)[None, :]
    row_RC = row_R[:, None] + tl.zeros((1, CHUNKS), tl.int64)
    inside_RC = inside_R[:, None] & (chunk_C < chunks)
    words_RCW = tl.reshape(words_RW, [ROWS, CHUNKS, 32])
    return decode_words(words_RCW, scales, zeros, row_RC, chunk_C, inside_RC, groups, GROUP, dtype, PTX)


@triton.jit(do_not_specialize=["tokens", "share"])
def _gemm(
    x, words, scales, zeros, bias, out, tokens, outputs, inputs, chunks, groups, share,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, TOKENS: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, splits). A split has `share` iterations of CHUNKS chunks."""
    tiles = tl.cdiv(tokens, TOKENS)
    first_o = tl.program_id(0) // tiles * ROWS
    first = tl.program_id(1) * share * CHUNKS
    first_t = tl.program_id(0) % tiles * TOKENS
    output_R, token_T = first_o + tl.arange(0, ROWS), first_t + tl.arange(0, TOKENS)
    inside_R, real_T = output_R < outputs, token_T < tokens
    row_R = output_R.to(tl.int64)
    word_W = tl.arange(0, CHUNKS * 32)
    column_C = tl.arange(0, CHUNKS * 128)
    words_RW = words + row_R[:, None] * (chunks * 32) + word_W[None, :]
    x_TC = x + token_T.to(tl.int64)[:, None] * inputs + column_C[None, :]
    total_RT = tl.zeros((ROWS, TOKENS), tl.float32)
    if FETCH:
        pdl_launch_dependents(PDL)
        start_of_tile = words + first_o.to(tl.int64) * (chunks * 32) + first * 32
        prefetch_rows(start_of_tile, ROWS, chunks * 64, share * CHUNKS * 64, PDL)
    pdl_wait(PDL)
    for chunk in range(first, tl.minimum(first + share * CHUNKS, chunks), CHUNKS):
        if EVEN:
            part_RW = tl.load(words_RW + chunk * 32)
            part_TC = tl.load(x_TC + chunk * 128, mask=real_T[:, None], other=0.0)
        else:
            inside_RW = inside_R[:, None] & (word_W < (chunks - chunk) * 32)[None, :]
            part_RW = tl.load(words_RW + chunk * 32, mask=inside_RW, other=0)
            inside_TC = real_T[:, None] & (column_C < inputs - chunk * 128)[None, :]
            part_TC = tl.load(x_TC + chunk * 128, mask=inside_TC, other=0.0)
        a, b, c, d = _chunks_of(
            part_RW, scales, zeros, row_R, inside_R, chunk, chunks, groups, part_TC.dtype, GROUP, PTX, ROWS,
            CHUNKS,
        )  # fmt: skip
        weight_RC = tl.reshape(join_quarters(a, b, c, d), [ROWS, CHUNKS * 128])
        total_RT = tl.dot(weight_RC, tl.trans(part_TC), total_RT, input_precision="ieee")
    if not FETCH:
        pdl_launch_dependents(PDL)
    if HAS_BIAS:
        total_RT += tl.load(bias + output_R, mask=inside_R, other=0.0).to(tl.float32)[:, None]
    place_RT = (tl.program_id(1) * tokens + token_T).to(tl.int64)[None, :] * outputs + output_R[:, None]
    tl.store(out + place_RT, total_RT.to(out.dtype.element_ty), mask=inside_R[:, None] & real_T[None, :])


@triton.jit
def _dequantize(
    words, scales, zeros, out, outputs, inputs, chunks, groups,
    GROUP: tl.constexpr, PTX: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROWS rows, blocks of CHUNKS chunks)."""
    pdl_begin(PDL)
    output_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk = tl.program_id(1) * CHUNKS
    row_R = output_R.to(tl.int64)
    inside_R = output_R < outputs
    word_W = tl.arange(0, CHUNKS * 32)
    inside_RW = inside_R[:, None] & (word_W < (chunks - chunk) * 32)[None, :]
    words_RW = tl.load(
        words + row_R[:, None] * (chunks * 32) + chunk * 32 + word_W[None, :], mask=inside_RW, other=0
    )  # fmt: skip
    a, b, c, d = _chunks_of(
        words_RW, scales, zeros, row_R, inside_R, chunk, chunks, groups, out.dtype.element_ty, GROUP, PTX,
        ROWS, CHUNKS,
    )  # fmt: skip
    column_C = chunk * 128 + tl.arange(0, CHUNKS * 128)
    inside_RC = inside_R[:, None] & (column_C < inputs)[None, :]
    numbers_RC = tl.reshape(join_quarters(a, b, c, d), [ROWS, CHUNKS * 128])
    tl.store(out + row_R[:, None] * inputs + column_C[None, :], numbers_RC, mask=inside_RC)


def multiply(
    plan: GemmPlan, x_TI: Tensor, weight: FourBitWords, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[T, O] in `dtype`."""
    outputs, inputs = weight.shape
    tokens = len(x_TI)
    x_TI = x_TI.contiguous()
    chunks = triton.cdiv(inputs, COLUMNS)
    at_once = plan.columns // COLUMNS
    share = triton.cdiv(chunks, plan.split_k * at_once)
    split_k = triton.cdiv(chunks, share * at_once)
    out_TO = torch.empty(tokens, outputs, dtype=dtype, device=x_TI.device)
    sums = partials_of(out_TO, split_k)
    even = outputs % plan.rows == 0 and inputs == split_k * share * plan.columns
    _gemm[(triton.cdiv(outputs, plan.rows) * triton.cdiv(tokens, plan.tile), split_k)](
        x_TI, weight.words, weight.scales, weight.zeros, bias, sums,
        tokens, outputs, inputs, chunks, weight.scales.shape[1], share,
        HAS_BIAS=bias is not None and split_k == 1, EVEN=even, ROWS=plan.rows, CHUNKS=at_once,
        TOKENS=plan.tile, FETCH=even and fits_cache(weight.words),
        num_warps=plan.warps, num_stages=plan.stages, **settings_of(weight),
        **launch_options(x_TI.device),
    )  # fmt: skip
    return out_TO if split_k == 1 else reduce_partials(sums, bias, out_TO)


def dequantized(weight: FourBitWords, dtype: torch.dtype) -> Tensor:
    """[..., O, I] in `dtype`."""
    inputs = weight.inputs
    device = weight.words.device
    out = torch.empty(weight.shape, dtype=dtype, device=device)
    rows = out.numel() // inputs
    chunks = triton.cdiv(inputs, COLUMNS)
    _dequantize[(triton.cdiv(rows, _DECODED_ROWS), triton.cdiv(chunks, _DECODED_CHUNKS))](
        weight.words, weight.scales, weight.zeros, out, rows, inputs, chunks, weight.scales.shape[-1],
        ROWS=_DECODED_ROWS, CHUNKS=_DECODED_CHUNKS, num_warps=4, **settings_of(weight),
        **launch_options(device),
    )  # fmt: skip
    return out
