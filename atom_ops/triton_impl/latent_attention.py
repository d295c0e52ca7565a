"""Latent attention in Triton: rows of the cache serve all heads, and are their own values.

    row of the cache    latent C | key R        scores from all of it, values from the latent

Some heads of some tokens of a row stand as queries side by side: query m of a program is token
m // HEADS, head m % HEADS of a block of heads. So a row of the cache, read once, is multiplied
with 16 to 64 queries, and once more as a value from where it already lies.

    short rows    of few tokens (decodes): bound by memory, so contexts are also cut into splits,
                  a program each, which `_combine` puts together
    long rows     tiles of rows of many tokens, a program for each tile and block of heads

With `split_tokens` all rows are long ones, and no context is cut: then the bits of a token depend
on neither its batch nor its phase.
"""

from dataclasses import dataclass
from functools import cache as kept

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention_plan import AttentionPlan
from atom_ops.ops.latent_attention import latent_attention
from atom_ops.ops.latent_cache import LatentLayer
from atom_ops.triton_impl import INTERPRETED, NEEDS, runs_on
from atom_ops.triton_impl.fp8 import decode_fp8
from atom_ops.triton_impl.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.tiles import row_of_tile

_ANY_ALIGNMENT = ["table", "contexts", "starts", "scales"]
_LOG2_E = 1.4426950408889634
# Stands for the highest of no scores: finite, for the difference of two must not be NaN.
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _fold(
    top_M, total_M, sum_MC, q_MC, q_MR, seen_M, start, stop, slot_N, rows, scales, score_scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take tokens start … start + BLOCK_N - 1 of the context, in their slots, into the softmax.

    MASKED: some of these may not exist (from `stop` on) or not be seen by every query.
    """
    token_N = start + tl.arange(0, BLOCK_N)
    feature_C, feature_R = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    exists_N = token_N < stop
    row_N1 = rows + slot_N[:, None] * (LATENT + ROPE)
    # What lies outside may be NaN, so it is not read: 0 * NaN would be NaN.
    if MASKED or LATENT != BLOCK_C:
        latent_NC = tl.load(
            row_N1 + feature_C[None, :], mask=exists_N[:, None] & (feature_C < LATENT)[None, :], other=0
        )
    else:
        latent_NC = tl.load(row_N1 + feature_C[None, :])
    if MASKED or ROPE != BLOCK_R:
        inside_NR = exists_N[:, None] & (feature_R < ROPE)[None, :]
        key_NR = tl.load(row_N1 + LATENT + feature_R[None, :], mask=inside_NR, other=0)
    else:
        key_NR = tl.load(row_N1 + LATENT + feature_R[None, :])
    if SCALED:
        latent_NC, key_NR = decode_fp8(latent_NC, q_MC.dtype), decode_fp8(key_NR, q_MC.dtype)
    latent_NC, key_NR = latent_NC.to(q_MC.dtype), key_NR.to(q_MC.dtype)
    score_MN = tl.dot(q_MR, tl.trans(key_NR), input_precision="ieee")
    score_MN = tl.dot(q_MC, tl.trans(latent_NC), score_MN, input_precision="ieee") * score_scale
    if SCALED:
        scale_N = tl.load(scales + slot_N, mask=exists_N, other=0.0)
        score_MN = score_MN * scale_N[None, :]
    if MASKED:
        score_MN = tl.where(token_N[None, :] <= seen_M[:, None], score_MN, float("-inf"))

    new_top_M = tl.maximum(top_M, tl.max(score_MN, 1))
    kept_M = tl.exp2(top_M - new_top_M)
    weight_MN = tl.exp2(score_MN - new_top_M[:, None])
    total_M = total_M * kept_M + tl.sum(weight_MN, 1)
    if SCALED:
        weight_MN = weight_MN * scale_N[None, :]
    sum_MC = tl.dot(weight_MN.to(q_MC.dtype), latent_NC, sum_MC * kept_M[:, None], input_precision="ieee")
    return new_top_M, total_M, sum_MC


@triton.jit
def _slots_of(start, stop, table, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    token_N = start + tl.arange(0, BLOCK_N)
    block_N = tl.load(table + token_N // BLOCK_SIZE, mask=token_N < stop, other=0).to(tl.int64)
    return block_N * BLOCK_SIZE + token_N % BLOCK_SIZE


@triton.jit
def _attend(
    q_MC, q_MR, seen_M, first, seen_by_all, stop, table, rows, scales, score_scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Highest score, sum of weights and weighted sum of latents over tokens first … stop - 1.

    Tokens before `seen_by_all`, whole blocks of them, exist and are seen by every query.
    """
    top_M = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total_M = tl.zeros((BLOCK_M,), tl.float32)
    sum_MC = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    # One step ahead, so that rows need not wait for their addresses.
    next_slot_N = _slots_of(first, stop, table, BLOCK_SIZE, BLOCK_N)
    for start in range(first, seen_by_all, BLOCK_N):
        slot_N = next_slot_N
        next_slot_N = _slots_of(start + BLOCK_N, stop, table, BLOCK_SIZE, BLOCK_N)
        top_M, total_M, sum_MC = _fold(
            top_M, total_M, sum_MC, q_MC, q_MR, seen_M, start, stop, slot_N, rows, scales, score_scale,
            LATENT, ROPE, BLOCK_N, BLOCK_C, BLOCK_R, SCALED, False,
        )  # fmt: skip
    for start in range(seen_by_all, stop, BLOCK_N):
        slot_N = next_slot_N
        next_slot_N = _slots_of(start + BLOCK_N, stop, table, BLOCK_SIZE, BLOCK_N)
        top_M, total_M, sum_MC = _fold(
            top_M, total_M, sum_MC, q_MC, q_MR, seen_M, start, stop, slot_N, rows, scales, score_scale,
            LATENT, ROPE, BLOCK_N, BLOCK_C, BLOCK_R, SCALED, True,
        )  # fmt: skip
    return top_M, total_M, sum_MC


@triton.jit
def _share(context, splits, BLOCK_N: tl.constexpr):
    """Tokens of one split, of so many that there may be."""
    blocks = tl.cdiv(context, BLOCK_N)
    return tl.maximum(tl.cdiv(blocks, splits), 1) * BLOCK_N


@triton.jit(
    do_not_specialize=["table_stride", "rows_of_step", "shortest"],
    do_not_specialize_on_alignment=_ANY_ALIGNMENT,
)
def _latent_rows(
    q, out, rows, scales, table, contexts, starts, parts, part_states,
    q_token_stride, q_head_stride, table_stride, score_scale, heads, rows_of_step, shortest,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, SHORT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of heads, splits, rows of the step or numbers of tiles).

    SHORT: takes rows of at most TILE tokens; otherwise those of `shortest` and more, whole.
    """
    pdl_begin(PDL)
    if SHORT:
        row = tl.program_id(2)
        first_token = tl.load(starts + row)
        tile_start = 0
    else:
        # The last tiles of a row have the most to do and come first.
        number = tl.num_programs(2) - 1 - tl.program_id(2)
        row = row_of_tile(number, starts, 0, rows_of_step, TILE)
        first_token = tl.load(starts + row)
        tile_start = (number - first_token // TILE - row) * TILE
    length = tl.load(starts + row + 1) - first_token
    context = tl.load(contexts + row)
    share = _share(context, tl.num_programs(1), BLOCK_N)
    first = tl.program_id(1) * share
    if SHORT:
        elsewhere = (length > TILE) | (length <= 0) | ((first >= context) & (first > 0))
    else:
        elsewhere = (length < shortest) | (tile_start >= length)
    if elsewhere:
        return

    BLOCK_M: tl.constexpr = TILE * HEADS
    m = tl.arange(0, BLOCK_M)
    feature_C, feature_R = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    inside_M = tile_start + m // HEADS
    head_M = tl.program_id(0) * HEADS + m % HEADS
    wanted_M = (inside_M < length) & (head_M < heads)
    wanted_MC = wanted_M[:, None] & (feature_C < LATENT)[None, :]
    token_M = (first_token + inside_M).to(tl.int64)
    q_M1 = q + (token_M * q_token_stride + head_M * q_head_stride)[:, None]
    q_MC = tl.load(q_M1 + feature_C[None, :], mask=wanted_MC, other=0.0)
    wanted_MR = wanted_M[:, None] & (feature_R < ROPE)[None, :]
    q_MR = tl.load(q_M1 + LATENT + feature_R[None, :], mask=wanted_MR, other=0.0)

    before = context - length + tile_start
    stop = tl.minimum(tl.minimum(first + share, context), before + TILE)
    # Whole blocks that every query sees.
    seen_by_all = tl.maximum(tl.minimum(stop, before + 1), first)
    seen_by_all = first + (seen_by_all - first) // BLOCK_N * BLOCK_N
    seen_M = before + m // HEADS
    table += row.to(tl.int64) * table_stride
    top_M, total_M, sum_MC = _attend(
        q_MC, q_MR, seen_M, first, seen_by_all, stop, table, rows, scales, score_scale,
        LATENT, ROPE, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_C, BLOCK_R, SCALED,
    )  # fmt: skip

    if SHORT and parts is not None:
        # parts [R, TILE, H, splits, C]; part_states [R, TILE, H, splits, 2]
        part_M = ((row.to(tl.int64) * TILE + inside_M) * heads + head_M) * tl.num_programs(1)
        part_M += tl.program_id(1)
        tl.store(parts + part_M[:, None] * LATENT + feature_C[None, :], sum_MC, mask=wanted_MC)
        tl.store(part_states + part_M * 2, top_M, mask=wanted_M)
        tl.store(part_states + part_M * 2 + 1, total_M, mask=wanted_M)
    else:
        out_MC = sum_MC / tl.where(total_M > 0.0, total_M, 1.0)[:, None]
        out_M1 = out + ((token_M * heads + head_M) * LATENT)[:, None]
        tl.store(out_M1 + feature_C[None, :], out_MC.to(out.dtype.element_ty), mask=wanted_MC)


@triton.jit(do_not_specialize_on_alignment=["contexts", "starts"])
def _combine(
    out, contexts, starts, parts, part_states, heads, splits,
    LATENT: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (H, R * TILE): attention over whole contexts from that over their splits."""
    pdl_begin(PDL)
    head, row = tl.program_id(0), tl.program_id(1) // TILE
    inside = tl.program_id(1) % TILE
    first_token = tl.load(starts + row)
    length = tl.load(starts + row + 1) - first_token
    if (length > TILE) | (inside >= length):
        return
    context = tl.load(contexts + row)
    used = tl.maximum(tl.cdiv(context, _share(context, splits, BLOCK_N)), 1)
    part = (tl.program_id(1).to(tl.int64) * heads + head) * splits
    split_S = tl.arange(0, BLOCK_S)
    top_S = tl.load(part_states + (part + split_S) * 2, mask=split_S < used, other=_LOWEST)
    total_S = tl.load(part_states + (part + split_S) * 2 + 1, mask=split_S < used, other=0.0)
    top = tl.max(top_S, 0)
    total = tl.sum(total_S * tl.exp2(top_S - top), 0)
    feature_C = tl.arange(0, BLOCK_C)
    sum_C = tl.zeros((BLOCK_C,), tl.float32)
    for first in range(0, used, AT_ONCE):
        split_A = first + tl.arange(0, AT_ONCE)
        states_A = part_states + (part + split_A) * 2
        weight_A = tl.exp2(tl.load(states_A, mask=split_A < used, other=_LOWEST) - top)
        wanted_AC = (split_A < used)[:, None] & (feature_C < LATENT)[None, :]
        part_AC = parts + (part + split_A)[:, None] * LATENT + feature_C[None, :]
        sum_C += tl.sum(tl.load(part_AC, mask=wanted_AC, other=0.0) * weight_A[:, None], 0)
    out_C = out + ((first_token + inside).to(tl.int64) * heads + head) * LATENT + feature_C
    found_C = sum_C / tl.where(total > 0.0, total, 1.0)
    tl.store(out_C, found_C.to(out.dtype.element_ty), mask=feature_C < LATENT)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How the kernel is cut and compiled."""

    heads: int
    """Of a block, a power of two."""
    tile: int
    """Tokens of a row side by side; heads x tile is 16 or more."""
    tokens: int
    """Of the context at a time."""
    warps: int
    stages: int
    programs: int = 1
    """For each processor, that splits make up where rows and heads are fewer."""


_MOST_HEADS = 64
_MOST_NUMBERS = 576
"""Of a row, of which local memory holds two times 64 beside 64 queries."""
_AT_ONCE = 8
_LEAST_SPLIT = 128


def _blocks(q_THK: Tensor, cache: LatentLayer, queries: int) -> _Blocks:
    """With `queries` side by side, heads and tokens, or with one token's heads where these are more."""
    heads, numbers = q_THK.shape[1:]
    if (q_THK.dtype == torch.float32 and not INTERPRETED) or torch.version.hip is not None:
        # Little local memory, for such wide numbers or in so small a processor.
        padded = min(triton.next_power_of_2(heads), 16)
        return _Blocks(padded, 16 // padded, 16, 4, 1, 2)
    padded = min(triton.next_power_of_2(heads), _MOST_HEADS)
    tile = max(queries // padded, 1)
    if padded * tile < 64:
        return _Blocks(padded, tile, 32, 4, 3, 2)
    # Rows of a narrow cache are widened first, which takes more room.
    tokens = 64 if cache.scale is None and numbers <= _MOST_NUMBERS else 32
    return _Blocks(padded, tile, tokens, 8, 2)


def supports_latents(q_THK: Tensor, cache: LatentLayer) -> bool:
    """Whether `attend_latents` runs for them."""
    if INTERPRETED and q_THK.dtype == torch.bfloat16:
        return False  # the interpreter's bfloat16 products are wrong
    rope = q_THK.shape[2] - cache.latent_width
    return cache.latent_width <= 512 and 0 < rope <= 128 and q_THK.stride(2) == 1


@latent_attention.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda q_THK, cache, plan, scale: supports_latents(q_THK, cache),
)
def attend_latents(q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan, scale: float) -> Tensor:
    out_THC = q_THK.new_empty(*q_THK.shape[:2], cache.latent_width)
    if not len(q_THK):
        return out_THC
    long = _blocks(q_THK, cache, 64)
    if plan.split_tokens:
        _launch_long(out_THC, q_THK, cache, plan, scale, long, 0)
        return out_THC
    short = _blocks(q_THK, cache, 16)
    if plan.min_query_len <= short.tile:
        _launch_short(out_THC, q_THK, cache, plan, scale, short)
    if plan.max_query_len > short.tile:
        _launch_long(out_THC, q_THK, cache, plan, scale, long, short.tile + 1)
    return out_THC


def _launch_short(
    out_THC: Tensor, q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan, scale: float, blocks: _Blocks
) -> None:
    (_, heads, latent), rows = out_THC.shape, len(plan.context_lens_R)
    head_blocks = triton.cdiv(heads, blocks.heads)
    splits = _splits(plan, rows * head_blocks, blocks, q_THK.device)
    parts = part_states = None
    if splits > 1:
        entries = rows * blocks.tile * heads * splits
        parts = torch.empty(entries, latent, dtype=torch.float32, device=q_THK.device)
        part_states = torch.empty(entries, 2, dtype=torch.float32, device=q_THK.device)
    _latent_rows[(head_blocks, splits, rows)](
        *_arguments(out_THC, q_THK, cache, plan, parts, part_states, scale), 0,
        **_constants(q_THK, cache, blocks), SHORT=True,
    )  # fmt: skip
    if splits > 1:
        _combine[(heads, rows * blocks.tile)](
            out_THC, plan.context_lens_R, plan.query_starts_R1, parts, part_states, heads, splits,
            LATENT=latent, TILE=blocks.tile, BLOCK_N=blocks.tokens, BLOCK_C=triton.next_power_of_2(latent),
            BLOCK_S=triton.next_power_of_2(splits), AT_ONCE=_AT_ONCE, num_warps=4,
            **launch_options(q_THK.device),
        )  # fmt: skip


def _launch_long(
    out_THC: Tensor, q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan, scale: float, blocks: _Blocks,
    shortest: int,
) -> None:  # fmt: skip
    numbers = plan.num_tokens // blocks.tile + len(plan.context_lens_R)
    _latent_rows[(triton.cdiv(q_THK.shape[1], blocks.heads), 1, numbers)](
        *_arguments(out_THC, q_THK, cache, plan, None, None, scale), shortest,
        **_constants(q_THK, cache, blocks), SHORT=False,
    )  # fmt: skip


def _splits(plan: AttentionPlan, programs: int, blocks: _Blocks, device: torch.device) -> int:
    """Programs for each context."""
    wanted = blocks.programs * _num_sms(device) // programs
    return max(1, min(wanted, triton.cdiv(plan.max_context_len, max(_LEAST_SPLIT, blocks.tokens))))


def _arguments(
    out_THC: Tensor, q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan,
    parts: Tensor | None, part_states: Tensor | None, scale: float,
) -> tuple[Tensor | int | float | None, ...]:  # fmt: skip
    return (
        q_THK,
        out_THC,
        cache.rows.view(torch.uint8) if cache.scale is not None else cache.rows,
        # Without scales any tensor does: the kernel is compiled not to look at it.
        plan.context_lens_R if cache.scale is None else cache.scale,
        plan.block_table_RW,
        plan.context_lens_R,
        plan.query_starts_R1,
        parts,
        part_states,
        *q_THK.stride()[:2],
        plan.block_table_RW.stride(0),
        scale * _LOG2_E,
        q_THK.shape[1],
        len(plan.context_lens_R),
    )


def _constants(q_THK: Tensor, cache: LatentLayer, blocks: _Blocks) -> dict[str, int | bool]:
    rope = cache.rows.shape[2] - cache.latent_width
    return {
        "LATENT": cache.latent_width,
        "ROPE": rope,
        "BLOCK_SIZE": cache.rows.shape[1],
        "TILE": blocks.tile,
        "HEADS": blocks.heads,
        "BLOCK_N": blocks.tokens,
        "BLOCK_C": max(triton.next_power_of_2(cache.latent_width), 16),
        "BLOCK_R": max(triton.next_power_of_2(rope), 16),
        "SCALED": cache.scale is not None,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        **launch_options(q_THK.device),
    }


@kept
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 16  # interpreted: enough for several splits
    return torch.cuda.get_device_properties(device).multi_processor_count
