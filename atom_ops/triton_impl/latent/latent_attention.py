"""Absorbed latent attention in Triton (MQA): a cache row is the key of all heads and their value.

    row of the cache    latent C | key R        scores from all of it, values from the latent

A program computes a block of heads for a tile of a row's tokens: query m is token m // HEADS, head
m % HEADS of the block. So a cache row is loaded once for 16 to 64 queries, and used twice.

    decodes     memory-bound, so each context is also split over several programs; `_combine` merges
    prefills    a program for each tile of tokens and block of heads

With `split_tokens` every row is computed as a prefill, without splits: a token's bits depend on
neither its batch nor its phase.

Where ranks split the cache by tokens, a context is the rank's own tokens of it: context positions are
indices among these (`TokenShard`), and the log-sum-exp of each query is written, too.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.latent.latent_attention import latent_attention, partial_latent_attention
from atom_ops.ops.latent.latent_cache import LatentLayer
from atom_ops.ops.sampling.token_shard import TokenShard
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.shared_memory import buffers, fitting_block, fitting_stages
from atom_ops.triton_impl.hardware.target import INTERPRETED, NEEDS, runs_on
from atom_ops.triton_impl.hardware.tiles import row_of_tile
from atom_ops.triton_impl.quantized.fp8 import converts_float8, decode_fp8_pairs

_ANY_ALIGNMENT = ["table", "contexts", "starts", "scales"]
_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)
# The running maximum before any score: finite, because inf - inf would be NaN.
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _attend_block(
    top_M, total_M, sum_MC, odd_MC, q_MC, q_odd_MC, q_MR, q_odd_MR, seen_M, start, stop, slot_N, rows, scales,
    score_scale, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, SCALED: tl.constexpr, PTX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One iteration of the online softmax, over tokens start … start + BLOCK_N - 1 of the context.

    MASKED: some of them lie from `stop` on, or are hidden from some queries.
    SCALED: `rows` are words of two float8 codes, all widths count words, and odd features are apart.
    """
    token_N = start + tl.arange(0, BLOCK_N)
    feature_C = tl.arange(0, BLOCK_C)
    feature_R = tl.arange(0, BLOCK_R)
    exists_N = token_N < stop
    row_N1 = rows + slot_N[:, None] * (LATENT + ROPE)
    # Masked loads: unused slots may hold NaN, and 0 * NaN would be NaN.
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
        latent_NC, odd_NC = decode_fp8_pairs(latent_NC, q_MC.dtype, PTX)
        key_NR, odd_NR = decode_fp8_pairs(key_NR, q_MC.dtype, PTX)
    latent_NC, key_NR = latent_NC.to(q_MC.dtype), key_NR.to(q_MC.dtype)
    score_MN = tl.dot(q_MR, tl.trans(key_NR), input_precision="ieee")
    score_MN = tl.dot(q_MC, tl.trans(latent_NC), score_MN, input_precision="ieee")
    if SCALED:
        score_MN = tl.dot(q_odd_MR, tl.trans(odd_NR), score_MN, input_precision="ieee")
        score_MN = tl.dot(q_odd_MC, tl.trans(odd_NC), score_MN, input_precision="ieee")
        scale_N = tl.load(scales + slot_N, mask=exists_N, other=0.0)
        score_MN = score_MN * (scale_N * score_scale)[None, :]
    else:
        score_MN = score_MN * score_scale
    if MASKED:
        score_MN = tl.where(token_N[None, :] <= seen_M[:, None], score_MN, float("-inf"))

    new_top_M = tl.maximum(top_M, tl.max(score_MN, 1))
    rescale_M = tl.exp2(top_M - new_top_M)
    weight_MN = tl.exp2(score_MN - new_top_M[:, None])
    total_M = total_M * rescale_M + tl.sum(weight_MN, 1)
    if SCALED:
        weight_MN = weight_MN * scale_N[None, :]
    weight_MN = weight_MN.to(q_MC.dtype)
    sum_MC = tl.dot(weight_MN, latent_NC, sum_MC * rescale_M[:, None], input_precision="ieee")
    if SCALED:
        odd_MC = tl.dot(weight_MN, odd_NC, odd_MC * rescale_M[:, None], input_precision="ieee")
    return new_top_M, total_M, sum_MC, odd_MC


@triton.jit
def _slots_of(start, stop, table, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    token_N = start + tl.arange(0, BLOCK_N)
    entries_N = table + token_N // BLOCK_SIZE
    block_N = tl.load(entries_N, mask=token_N < stop, other=0, cache_modifier=".cg").to(tl.int64)
    return block_N * BLOCK_SIZE + token_N % BLOCK_SIZE


@triton.jit
def _attend(
    q_MC, q_MR, seen_M, next_slot_N, first, seen_by_all, stop, table, rows, scales, score_scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, SCALED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Maximum score, sum of weights and weighted sum of latents over tokens first … stop - 1.

    `next_slot_N`: the slots of the first BLOCK_N of them. Every query sees all tokens before `seen_by_all`,
    a multiple of BLOCK_N.
    """
    top_M = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total_M = tl.zeros((BLOCK_M,), tl.float32)
    # Float8: even and odd features apart, as words hold them.
    CODES: tl.constexpr = 2 if SCALED else 1
    sum_MC = tl.zeros((BLOCK_M, BLOCK_C // CODES), tl.float32)
    odd_MC = tl.zeros((BLOCK_M, BLOCK_C // CODES if SCALED else 1), tl.float32)
    if SCALED:
        q_MC, q_odd_MC = tl.split(tl.reshape(q_MC, (BLOCK_M, BLOCK_C // CODES, 2)))
        q_MR, q_odd_MR = tl.split(tl.reshape(q_MR, (BLOCK_M, BLOCK_R // CODES, 2)))
    else:
        q_odd_MC = q_MC
        q_odd_MR = q_MR
    # Slots are loaded one iteration ahead, to hide the latency of the indirection.
    for start in range(first, seen_by_all, BLOCK_N):
        slot_N = next_slot_N
        next_slot_N = _slots_of(start + BLOCK_N, stop, table, BLOCK_SIZE, BLOCK_N)
        top_M, total_M, sum_MC, odd_MC = _attend_block(
            top_M, total_M, sum_MC, odd_MC, q_MC, q_odd_MC, q_MR, q_odd_MR, seen_M, start, stop, slot_N,
            rows, scales, score_scale, LATENT // CODES, ROPE // CODES, BLOCK_N, BLOCK_C // CODES,
            BLOCK_R // CODES, SCALED, PTX, False,
        )  # fmt: skip
    for start in range(seen_by_all, stop, BLOCK_N):
        slot_N = next_slot_N
        next_slot_N = _slots_of(start + BLOCK_N, stop, table, BLOCK_SIZE, BLOCK_N)
        top_M, total_M, sum_MC, odd_MC = _attend_block(
            top_M, total_M, sum_MC, odd_MC, q_MC, q_odd_MC, q_MR, q_odd_MR, seen_M, start, stop, slot_N,
            rows, scales, score_scale, LATENT // CODES, ROPE // CODES, BLOCK_N, BLOCK_C // CODES,
            BLOCK_R // CODES, SCALED, PTX, True,
        )  # fmt: skip
    if SCALED:
        sum_MC = tl.interleave(sum_MC, odd_MC)
    return top_M, total_M, sum_MC


@triton.jit
def _own(tokens, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tokens on this rank among the first `tokens` (at least 0) of a sequence."""
    if RANKS > 1:
        tokens = (tokens + (RANKS - 1 - RANK)) // RANKS
    return tokens


@triton.jit
def _store_lse(lse, top, total, wanted):
    """Natural logarithm, from sums of powers of 2; -inf where no token is seen."""
    seen = total > 0.0
    value = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * _LN_2, float("-inf"))
    tl.store(lse, value, mask=wanted)


@triton.jit
def _store_state(state, top, total, wanted):
    tl.store(state, top, mask=wanted)
    tl.store(state + 1, total, mask=wanted)


@triton.jit
def _share(context, splits, BLOCK_N: tl.constexpr):
    """Tokens of each split, with at most `splits` of them."""
    blocks = tl.cdiv(context, BLOCK_N)
    return tl.maximum(tl.cdiv(blocks, splits), 1) * BLOCK_N


# The blocks of heads of one tile are neighbours in the grid, so that they share the tile's latents in the L2
# cache. Tiles are in its first dimension because the others have at most 65,535 programs.
# DECODE: computes rows of at most TILES tiles of TILE tokens; otherwise whole rows of at least `min_tokens`.
# EARLY: DECODE reads `table`, `contexts` and `starts` before the wait, as inputs of the step (see `pdl`).
@triton.jit(
    do_not_specialize=["table_stride", "rows_of_step", "min_tokens"],
    do_not_specialize_on_alignment=_ANY_ALIGNMENT,
)
def _latent_rows(
    q, out, lse, rows, scales, table, contexts, starts, partial_sums, partial_states,
    q_token_stride, q_head_stride, table_stride, score_scale, heads, rows_of_step, min_tokens,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, TILES: tl.constexpr, DECODE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, SCALED: tl.constexpr, PTX: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of heads x (rows of the step x TILES or tile numbers), splits)."""
    pdl_launch_dependents(PDL)
    head_blocks = tl.cdiv(heads, HEADS)
    number = tl.program_id(0) // head_blocks
    if not (DECODE and EARLY):
        pdl_wait(PDL)
    if DECODE:
        row = number // TILES
        first_token = tl.load(starts + row, cache_modifier=".cg")
        tile_start = number % TILES * TILE
    else:
        # The last tiles of a row take longest and are launched first.
        number = tl.num_programs(0) // head_blocks - 1 - number
        row = row_of_tile(number, starts, 0, rows_of_step, TILE)
        first_token = tl.load(starts + row)
        tile_start = (number - first_token // TILE - row) * TILE
    length = tl.load(starts + row + 1, cache_modifier=".cg") - first_token
    whole_context = tl.load(contexts + row, cache_modifier=".cg")
    context = _own(whole_context, RANK, RANKS)
    share = _share(context, tl.num_programs(1), BLOCK_N)
    first = tl.program_id(1) * share
    if DECODE:
        elsewhere = (length > TILES * TILE) | (length <= tile_start) | ((first >= context) & (first > 0))
    else:
        elsewhere = (length < min_tokens) | (tile_start >= length)
    before = whole_context - length + tile_start
    stop = tl.minimum(tl.minimum(first + share, context), _own(before + TILE, RANK, RANKS))
    table += row.to(tl.int64) * table_stride
    slot_N = _slots_of(first, stop, table, BLOCK_SIZE, BLOCK_N)
    if DECODE and EARLY:
        pdl_wait(PDL)
    if elsewhere:
        return

    BLOCK_M: tl.constexpr = TILE * HEADS
    m = tl.arange(0, BLOCK_M)
    feature_C = tl.arange(0, BLOCK_C)
    feature_R = tl.arange(0, BLOCK_R)
    inside_M = tile_start + m // HEADS
    head_M = tl.program_id(0) % head_blocks * HEADS + m % HEADS
    wanted_M = (inside_M < length) & (head_M < heads)
    wanted_MC = wanted_M[:, None] & (feature_C < LATENT)[None, :]
    token_M = (first_token + inside_M).to(tl.int64)
    q_M1 = q + (token_M * q_token_stride + head_M * q_head_stride)[:, None]
    q_MC = tl.load(q_M1 + feature_C[None, :], mask=wanted_MC, other=0.0)
    wanted_MR = wanted_M[:, None] & (feature_R < ROPE)[None, :]
    q_MR = tl.load(q_M1 + LATENT + feature_R[None, :], mask=wanted_MR, other=0.0)

    # Tokens that every query sees, in whole iterations.
    seen_by_all = tl.maximum(tl.minimum(stop, _own(before + 1, RANK, RANKS)), first)
    seen_by_all = first + (seen_by_all - first) // BLOCK_N * BLOCK_N
    seen_M = before + m // HEADS
    if RANKS > 1:
        seen_M = _own(seen_M + 1, RANK, RANKS) - 1
    top_M, total_M, sum_MC = _attend(
        q_MC, q_MR, seen_M, slot_N, first, seen_by_all, stop, table, rows, scales, score_scale,
        LATENT, ROPE, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_C, BLOCK_R, SCALED, PTX,
    )  # fmt: skip

    if DECODE and partial_sums is not None:  # noqa: SIM102 - only this is known at compile time
        if share < context:
            # partial_sums [R, TILES * TILE, H, splits, C]; partial_states [R, TILES * TILE, H, splits, 2]
            query_M = (row.to(tl.int64) * (TILES * TILE) + inside_M) * heads + head_M
            place_M = query_M * tl.num_programs(1) + tl.program_id(1)
            tl.store(partial_sums + place_M[:, None] * LATENT + feature_C[None, :], sum_MC, mask=wanted_MC)
            _store_state(partial_states + place_M * 2, top_M, total_M, wanted_M)
            return
    out_MC = sum_MC / tl.where(total_M > 0.0, total_M, 1.0)[:, None]
    out_M1 = out + ((token_M * heads + head_M) * LATENT)[:, None]
    tl.store(out_M1 + feature_C[None, :], out_MC.to(out.dtype.element_ty), mask=wanted_MC)
    if lse is not None:
        _store_lse(lse + token_M * heads + head_M, top_M, total_M, wanted_M)


@triton.jit(do_not_specialize_on_alignment=["contexts", "starts"])
def _combine(
    out, lse, contexts, starts, partial_sums, partial_states, heads, splits,
    LATENT: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr, AT_ONCE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (H, R * TILE): merges the splits of each context of more than one. EARLY: as in `_latent_rows`."""
    pdl_launch_dependents(PDL)
    if not EARLY:
        pdl_wait(PDL)
    head = tl.program_id(0)
    row = tl.program_id(1) // TILE
    inside = tl.program_id(1) % TILE
    first_token = tl.load(starts + row, cache_modifier=".cg")
    length = tl.load(starts + row + 1, cache_modifier=".cg") - first_token
    context = _own(tl.load(contexts + row, cache_modifier=".cg"), RANK, RANKS)
    used = tl.cdiv(context, _share(context, splits, BLOCK_N))
    if EARLY:
        pdl_wait(PDL)
    if (length > TILE) | (inside >= length) | (used <= 1):
        return
    partial = (tl.program_id(1).to(tl.int64) * heads + head) * splits
    split_S = tl.arange(0, BLOCK_S)
    top_S = tl.load(partial_states + (partial + split_S) * 2, mask=split_S < used, other=_LOWEST)
    total_S = tl.load(partial_states + (partial + split_S) * 2 + 1, mask=split_S < used, other=0.0)
    top = tl.max(top_S, 0)
    total = tl.sum(total_S * tl.exp2(top_S - top), 0)
    feature_C = tl.arange(0, BLOCK_C)
    sum_C = tl.zeros((BLOCK_C,), tl.float32)
    for first in range(0, used, AT_ONCE):
        split_A = first + tl.arange(0, AT_ONCE)
        states_A = partial_states + (partial + split_A) * 2
        weight_A = tl.exp2(tl.load(states_A, mask=split_A < used, other=_LOWEST) - top)
        wanted_AC = (split_A < used)[:, None] & (feature_C < LATENT)[None, :]
        partial_AC = partial_sums + (partial + split_A)[:, None] * LATENT + feature_C[None, :]
        sum_C += tl.sum(tl.load(partial_AC, mask=wanted_AC, other=0.0) * weight_A[:, None], 0)
    out_C = out + ((first_token + inside).to(tl.int64) * heads + head) * LATENT + feature_C
    out_value_C = sum_C / tl.where(total > 0.0, total, 1.0)
    tl.store(out_C, out_value_C.to(out.dtype.element_ty), mask=feature_C < LATENT)
    if lse is not None:
        _store_lse(lse + (first_token + inside).to(tl.int64) * heads + head, top, total, True)


@dataclass(frozen=True, slots=True)
class _KernelConfig:
    """Tile sizes and compile options."""

    heads: int
    """Heads of a block, a power of two."""
    tile: int
    """Tokens of a tile; heads x tile is at least 16."""
    tokens: int
    """Context tokens of one iteration."""
    warps: int
    stages: int
    programs: int = 1
    """Wanted programs per SM; contexts are split where rows x heads are fewer."""


_MAX_HEADS = 64
_AT_ONCE = 8
_LEAST_SPLIT = 128


def _config(q_THK: Tensor, cache: LatentLayer, queries: int) -> _KernelConfig:
    """The config for `queries` queries (heads x tokens) per program, or one token's block of heads."""
    heads = q_THK.shape[1]
    if (q_THK.dtype == torch.float32 and not INTERPRETED) or torch.version.hip is not None:
        # float32 rows, or the 64 KiB of LDS of an AMD CU.
        padded = min(triton.next_power_of_2(heads), 16)
        return _KernelConfig(padded, 16 // padded, 16, 4, 1, 2)
    padded = min(triton.next_power_of_2(heads), _MAX_HEADS)
    tile = max(queries // padded, 1)
    if padded * tile < 64:
        return _fitting(_KernelConfig(padded, tile, 32, 4, 3, 2), q_THK, cache)
    return _fitting(_KernelConfig(padded, tile, 64, 8, 2), q_THK, cache)


def _fitting(config: _KernelConfig, q_THK: Tensor, cache: LatentLayer) -> _KernelConfig:
    """The config, with fewer stages or context tokens where these do not fit in shared memory."""
    device, size = q_THK.device, q_THK.element_size()
    queries = config.heads * config.tile
    row = sum(_block_widths(cache)) * size

    def weights_and_queries(tokens: int) -> int:
        return queries * (tokens * size + row)

    def least(tokens: int) -> int:
        return weights_and_queries(tokens) + buffers(2, device) * tokens * row

    tokens = fitting_block(config.tokens, least, device)
    stages = fitting_stages(config.stages, tokens * row, device, weights_and_queries(tokens))
    return replace(config, tokens=tokens, stages=stages)


def _block_widths(cache: LatentLayer) -> tuple[int, int]:
    """The powers of two that the two parts of a row fill."""
    least = 16 if cache.scale is None else 32
    widths = cache.latent_width, cache.rows.shape[2] - cache.latent_width
    return max(triton.next_power_of_2(widths[0]), least), max(triton.next_power_of_2(widths[1]), least)


def supports_latents(q_THK: Tensor, cache: LatentLayer) -> bool:
    """Whether `attend_latents` can compute these."""
    if INTERPRETED and q_THK.dtype == torch.bfloat16:
        return False  # the interpreter's bfloat16 tl.dot is wrong
    rope = q_THK.shape[2] - cache.latent_width
    if cache.scale is not None and (cache.latent_width % 2 or rope % 2):
        return False  # float8 codes are read as words of two
    return cache.latent_width <= 512 and 0 < rope <= 128 and q_THK.stride(2) == 1


@latent_attention.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda q_THK, cache, plan, scale: supports_latents(q_THK, cache),
)
def attend_latents(q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan, scale: float) -> Tensor:
    out_THC = q_THK.new_empty(*q_THK.shape[:2], cache.latent_width)
    _launch(_Output(out_THC), q_THK, cache, plan, scale)
    return out_THC


@partial_latent_attention.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda q_THK, cache, plan, scale: supports_latents(q_THK, cache),
)
def _partial_latent_attention(
    q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan, scale: float
) -> tuple[Tensor, Tensor]:
    out_THC = q_THK.new_empty(*q_THK.shape[:2], cache.latent_width)
    lse_TH = q_THK.new_empty(q_THK.shape[:2], dtype=torch.float32)
    _launch(_Output(out_THC, lse_TH), q_THK, cache, plan, scale)
    return out_THC, lse_TH


@dataclass(frozen=True, slots=True)
class _Output:
    """What the kernels write."""

    out_THC: Tensor
    lse_TH: Tensor | None = None


def _launch(output: _Output, q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan, scale: float) -> None:
    if not len(q_THK):
        return
    prefill = _config(q_THK, cache, 64)
    if plan.split_tokens:
        _launch_prefill(output, q_THK, cache, plan, scale, prefill, 0)
        return
    decode = _config(q_THK, cache, 16)
    if plan.decode_query_len > 1:
        # Drafts of a row are queries of the same program where its tile has room.
        decode = _config(q_THK, cache, min(64, decode.heads * triton.next_power_of_2(plan.decode_query_len)))
    tiles = triton.cdiv(plan.decode_query_len, decode.tile)
    longest = tiles * decode.tile
    if plan.min_query_len <= longest:
        _launch_decode(output, q_THK, cache, plan, scale, decode, tiles)
    if plan.max_query_len > longest:
        _launch_prefill(output, q_THK, cache, plan, scale, prefill, longest + 1)


def _launch_decode(
    output: _Output,
    q_THK: Tensor,
    cache: LatentLayer,
    plan: AttentionPlan,
    scale: float,
    config: _KernelConfig,
    tiles: int,
) -> None:
    """Attention of the rows of at most `tiles` tiles, split over the context where that helps."""
    _, heads, latent = output.out_THC.shape
    rows = len(plan.context_lens_R)
    head_blocks = triton.cdiv(heads, config.heads)
    row_tokens = tiles * config.tile
    splits = _splits(plan, cache.shard, rows * tiles * head_blocks, config, q_THK.device)
    partial_sums = partial_states = None
    if splits > 1:
        entries = rows * row_tokens * heads * splits
        partial_sums = torch.empty(entries, latent, dtype=torch.float32, device=q_THK.device)
        partial_states = torch.empty(entries, 2, dtype=torch.float32, device=q_THK.device)
    _latent_rows[(head_blocks * rows * tiles, splits)](
        *_arguments(output, q_THK, cache, plan, partial_sums, partial_states, scale), 0,
        **_constants(q_THK, cache, config), TILES=tiles, DECODE=True, EARLY=plan.is_step_input,
    )  # fmt: skip
    if splits > 1:
        _combine[(heads, rows * row_tokens)](
            output.out_THC, output.lse_TH, plan.context_lens_R, plan.query_starts_R1,
            partial_sums, partial_states, heads, splits,
            LATENT=latent, TILE=row_tokens, BLOCK_N=config.tokens, BLOCK_C=triton.next_power_of_2(latent),
            BLOCK_S=triton.next_power_of_2(splits), AT_ONCE=_AT_ONCE, RANK=cache.shard.rank,
            RANKS=cache.shard.ranks, EARLY=plan.is_step_input, num_warps=4,
            **launch_options(q_THK.device),
        )  # fmt: skip


def _launch_prefill(
    output: _Output, q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan, scale: float,
    config: _KernelConfig, min_tokens: int,
) -> None:  # fmt: skip
    numbers = plan.num_tokens // config.tile + len(plan.context_lens_R)
    _latent_rows[(triton.cdiv(q_THK.shape[1], config.heads) * numbers, 1)](
        *_arguments(output, q_THK, cache, plan, None, None, scale), min_tokens,
        **_constants(q_THK, cache, config), TILES=1, DECODE=False, EARLY=False,
    )  # fmt: skip


def _splits(
    plan: AttentionPlan, shard: TokenShard, programs: int, config: _KernelConfig, device: torch.device
) -> int:
    """Splits of each context."""
    wanted = config.programs * _num_sms(device) // programs
    longest = shard.count(plan.max_context_len)
    return max(1, min(wanted, triton.cdiv(longest, max(_LEAST_SPLIT, config.tokens))))


def _arguments(
    output: _Output, q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan,
    partial_sums: Tensor | None, partial_states: Tensor | None, scale: float,
) -> tuple[Tensor | int | float | None, ...]:  # fmt: skip
    return (
        q_THK,
        output.out_THC,
        output.lse_TH,
        cache.rows if cache.scale is None else cache.rows.view(torch.int16),  # words of two codes
        # Without scales the kernel ignores this argument.
        plan.context_lens_R if cache.scale is None else cache.scale,
        plan.block_table_RW,
        plan.context_lens_R,
        plan.query_starts_R1,
        partial_sums,
        partial_states,
        *q_THK.stride()[:2],
        plan.block_table_RW.stride(0),
        scale * _LOG2_E,
        q_THK.shape[1],
        len(plan.context_lens_R),
    )


def _constants(q_THK: Tensor, cache: LatentLayer, config: _KernelConfig) -> dict[str, int | bool]:
    rope = cache.rows.shape[2] - cache.latent_width
    block_latent, block_rope = _block_widths(cache)
    return {
        "LATENT": cache.latent_width,
        "ROPE": rope,
        "BLOCK_SIZE": cache.rows.shape[1],
        "TILE": config.tile,
        "HEADS": config.heads,
        "BLOCK_N": config.tokens,
        "BLOCK_C": block_latent,
        "BLOCK_R": block_rope,
        "SCALED": cache.scale is not None,
        "PTX": converts_float8(q_THK.device),
        "RANK": cache.shard.rank,
        "RANKS": cache.shard.ranks,
        "num_warps": config.warps,
        "num_stages": config.stages,
        **launch_options(q_THK.device),
    }


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 16  # interpreted: enough for several splits
    return torch.cuda.get_device_properties(device).multi_processor_count
