"""Sparse attention in Triton: the indexer's scores, top-k, and attention to the top-k tokens.

    _index_scores    a program for a token and a block of its context; scores go to a workspace
    _select_topk     a program for a token: radix select. Four passes find the k-th highest score,
                     8 bits each, by a histogram of the scores that share the bits found so far.
                     One more pass writes the slots in the order of positions.
    _count_digits, _write_topk
                     the same for few tokens with long contexts, cut into segments with a program each:
                     a launch for each pass. The segments' histograms also tell where each one writes.

Attention to the top-k tokens is latent attention with a row for each token and a block table of
blocks of one token.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.latent.index_keys import IndexKeys
from atom_ops.ops.latent.latent_cache import LatentLayer
from atom_ops.ops.latent.sparse_attention import TopKIndices, index_topk, sparse_latent_attention
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.shared_memory import fitting_block, product_bytes
from atom_ops.triton_impl.hardware.target import INTERPRETED, NEEDS, runs_on
from atom_ops.triton_impl.latent.latent_attention import attend_latents, supports_latents
from atom_ops.triton_impl.quantized.fp8 import decode_fp8

_ANY_ALIGNMENT = ["table", "contexts", "starts", "scales"]


@triton.jit
def row_and_seen(token, contexts, starts, rows):
    """The row of a token of the step, and how many tokens it sees; 0 for padding."""
    low, high = 0, rows
    while low < high:
        middle = (low + high) // 2
        after = tl.load(starts + middle + 1) <= token
        low = tl.where(after, middle + 1, low)
        high = tl.where(after, high, middle)
    row = tl.minimum(low, rows - 1)
    seen = tl.load(contexts + row) - tl.load(starts + row + 1) + token + 1
    return row, tl.maximum(tl.where(low < rows, seen, 0), 0)


@triton.jit(
    do_not_specialize=["first_token", "table_stride", "rows", "count"],
    do_not_specialize_on_alignment=_ANY_ALIGNMENT,
)
def _index_scores(
    q, weights, keys, scales, table, contexts, starts, scores,
    first_token, q_token_stride, q_head_stride, weight_stride, table_stride, score_stride, rows, count,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, RATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens of the chunk, programs of each)."""
    pdl_begin(PDL)
    token = first_token + tl.program_id(0)
    row, seen = row_and_seen(token, contexts, starts, rows)
    seen = seen // RATE
    first = tl.program_id(1) * BLOCK_N
    if (seen <= count) | (first >= seen):
        return  # all tokens are in the top-k, or this program has none
    token = token.to(tl.int64)
    head_G = tl.arange(0, BLOCK_G)
    feature_I = tl.arange(0, BLOCK_I)
    wanted_GI = (head_G < HEADS)[:, None] & (feature_I < WIDTH)[None, :]
    q_GI = q + token * q_token_stride + (head_G * q_head_stride)[:, None] + feature_I[None, :]
    q_GI = tl.load(q_GI, mask=wanted_GI, other=0.0)
    weight_G = tl.load(weights + token * weight_stride + head_G, mask=head_G < HEADS, other=0.0)
    table += row.to(tl.int64) * table_stride
    scores += tl.program_id(0).to(tl.int64) * score_stride
    for start in range(first, seen, BLOCK_N * tl.num_programs(1)):
        position_N = start + tl.arange(0, BLOCK_N)
        exists_N = position_N < seen
        block_N = tl.load(table + position_N // BLOCK_SIZE, mask=exists_N, other=0).to(tl.int64)
        slot_N = block_N * BLOCK_SIZE + position_N % BLOCK_SIZE
        wanted_NI = exists_N[:, None] & (feature_I < WIDTH)[None, :]
        key_NI = tl.load(keys + slot_N[:, None] * WIDTH + feature_I[None, :], mask=wanted_NI, other=0)
        if SCALED:
            key_NI = decode_fp8(key_NI, q_GI.dtype)
        product_GN = tl.dot(q_GI, tl.trans(key_NI.to(q_GI.dtype)), input_precision="ieee")
        score_N = tl.sum(tl.maximum(product_GN, 0.0) * weight_G[:, None], 0)
        if SCALED:
            score_N = score_N * tl.load(scales + slot_N, mask=exists_N, other=0.0)
        tl.store(scores + position_N, score_N, mask=exists_N)


@triton.jit
def _rank(score):
    """uint32 that sorts like the scores; equal for both zeros."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -0x80000000).to(tl.uint32, bitcast=True)


@triton.jit
def _histogram(least, scores, first, stop, SHIFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Scores first … stop - 1 whose ranks begin with the bits `least`, counted by their next 8 bits."""
    found_B = tl.zeros((256,), tl.int32)
    for start in range(first, stop, BLOCK_N):
        position_N = start + tl.arange(0, BLOCK_N)
        counted_N = position_N < stop
        rank_N = _rank(tl.load(scores + position_N, mask=counted_N, other=0.0))
        if SHIFT < 24:
            counted_N = counted_N & ((rank_N >> (SHIFT + 8)) == least)
        digit_N = ((rank_N >> SHIFT) & 0xFF).to(tl.int32)
        found_B += tl.histogram(tl.where(counted_N, digit_N, 0), 256)
        # The histogram counted the masked scores as digit 0.
        others = BLOCK_N - tl.sum(counted_N.to(tl.int32), 0)
        found_B -= tl.where(tl.arange(0, 256) == 0, others, 0)
    return found_B


@triton.jit
def _next_digit(least, left, found_B):
    """The k-th highest rank's bits with 8 more, and how many of the tokens that share them are written."""
    above_B = tl.sum(found_B, 0) - tl.cumsum(found_B, 0)
    here_B = (above_B < left) & (above_B + found_B >= left)
    digit = tl.sum(tl.where(here_B, tl.arange(0, 256), 0), 0)
    left -= tl.sum(tl.where(here_B, above_B, 0), 0)
    return (least << 8) | digit.to(tl.uint32), left


@triton.jit
def _write_selected(
    slots, scores, table, first, stop, written, equal, least, left, all_selected,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the slots selected among tokens first … stop - 1, after `written` slots and `equal` ties."""
    for start in range(first, stop, BLOCK_N):
        position_N = start + tl.arange(0, BLOCK_N)
        selected_N = position_N < stop
        if not all_selected:
            rank_N = _rank(tl.load(scores + position_N, mask=selected_N, other=0.0))
            equal_N = selected_N & (rank_N == least)
            order_N = equal + tl.cumsum(equal_N.to(tl.int32), 0)
            equal += tl.sum(equal_N.to(tl.int32), 0)
            selected_N = (selected_N & (rank_N > least)) | (equal_N & (order_N <= left))
        block_N = tl.load(table + position_N // BLOCK_SIZE, mask=selected_N, other=0)
        place_N = written + tl.cumsum(selected_N.to(tl.int32), 0) - 1
        written += tl.sum(selected_N.to(tl.int32), 0)
        tl.store(slots + place_N, block_N * BLOCK_SIZE + position_N % BLOCK_SIZE, mask=selected_N)


@triton.jit
def _write_count(slots, counts, topk, count, BLOCK_N: tl.constexpr):
    """Store how many slots there are, and -1 after them."""
    tl.store(counts, topk)
    for start in range(topk, count, BLOCK_N):
        place_N = start + tl.arange(0, BLOCK_N)
        tl.store(slots + place_N, tl.full((BLOCK_N,), -1, tl.int32), mask=place_N < count)


@triton.jit
def _segment(seen, BLOCK_N: tl.constexpr):
    """First and last token (exclusive) of this program's segment of a context."""
    share = tl.cdiv(tl.cdiv(seen, BLOCK_N), tl.num_programs(1)) * BLOCK_N
    first = tl.program_id(1) * share
    return first, tl.minimum(first + share, seen)


@triton.jit
def _bits_after(histograms, states, PASS: tl.constexpr, BLOCK_S: tl.constexpr):
    """`least` and `left` after pass PASS, from all segments' histograms of it."""
    digit_B = tl.arange(0, 256)
    segment_S = tl.arange(0, BLOCK_S)
    at_SB = (PASS * tl.num_programs(1) + segment_S)[:, None] * 256 + digit_B[None, :]
    found_SB = tl.load(histograms + at_SB, mask=(segment_S < tl.num_programs(1))[:, None], other=0)
    least = tl.load(states + 2 * PASS).to(tl.uint32, bitcast=True)
    return _next_digit(least, tl.load(states + 2 * PASS + 1), tl.sum(found_SB, 0))


@triton.jit(do_not_specialize=["first_token", "rows", "count"], do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _count_digits(
    scores, contexts, starts, histograms, states, first_token, score_stride, rows, count,
    PASS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, RATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens of the chunk, segments): the histogram of each segment in pass PASS.

    histograms [tokens, 4, segments, 256]; states [tokens, 4, 2]: `least` and `left` before each pass.
    """
    pdl_begin(PDL)
    _, seen = row_and_seen(first_token + tl.program_id(0), contexts, starts, rows)
    seen = seen // RATE
    if seen <= count:
        return
    chunk_token = tl.program_id(0).to(tl.int64)
    histograms += chunk_token * (4 * 256) * tl.num_programs(1)
    states += chunk_token * 8
    if PASS == 0:
        least = tl.zeros((), tl.uint32)
        left = count
    else:
        least, left = _bits_after(histograms, states, PASS - 1, BLOCK_S)
    if tl.program_id(1) == 0:
        tl.store(states + 2 * PASS, least.to(tl.int32, bitcast=True))
        tl.store(states + 2 * PASS + 1, left)
    first, stop = _segment(seen, BLOCK_N)
    found_B = _histogram(least, scores + chunk_token * score_stride, first, stop, 24 - 8 * PASS, BLOCK_N)
    at_B = (PASS * tl.num_programs(1) + tl.program_id(1)) * 256 + tl.arange(0, 256)
    tl.store(histograms + at_B, found_B)


@triton.jit(
    do_not_specialize=["first_token", "table_stride", "rows", "count"],
    do_not_specialize_on_alignment=_ANY_ALIGNMENT,
)
def _write_topk(
    scores, table, contexts, starts, histograms, states, slots, counts,
    first_token, table_stride, score_stride, rows, count,
    BLOCK_SIZE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, RATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens of the chunk, segments)."""
    pdl_begin(PDL)
    token = first_token + tl.program_id(0)
    row, seen = row_and_seen(token, contexts, starts, rows)
    seen = seen // RATE
    chunk_token = tl.program_id(0).to(tl.int64)
    slots += token.to(tl.int64) * count
    if tl.program_id(1) == 0:
        _write_count(slots, counts + token, tl.minimum(seen, count), count, BLOCK_N)
    first, stop = _segment(seen, BLOCK_N)
    written = first
    equal = 0
    left = 0
    least = tl.zeros((), tl.uint32)
    if seen > count:
        histograms += chunk_token * (4 * 256) * tl.num_programs(1)
        least, left = _bits_after(histograms, states + chunk_token * 8, 3, BLOCK_S)
        # Scores of earlier segments above the k-th highest, counted in the pass of the first digit that
        # differs, and equal ones.
        digit_B = tl.arange(0, 256)
        segment_S = tl.arange(0, BLOCK_S)
        before_S1 = (segment_S < tl.program_id(1))[:, None]
        written = 0
        for number in tl.static_range(4):
            at_SB = (number * tl.num_programs(1) + segment_S)[:, None] * 256 + digit_B[None, :]
            found_B = tl.sum(tl.load(histograms + at_SB, mask=before_S1, other=0), 0)
            own_digit = ((least >> (24 - 8 * number)) & 0xFF).to(tl.int32)
            written += tl.sum(tl.where(digit_B > own_digit, found_B, 0), 0)
            equal = tl.sum(tl.where(digit_B == own_digit, found_B, 0), 0)
        written += tl.minimum(equal, left)
    _write_selected(
        slots, scores + chunk_token * score_stride, table + row.to(tl.int64) * table_stride, first, stop,
        written, equal, least, left, seen <= count, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["first_token", "table_stride", "rows", "count"],
    do_not_specialize_on_alignment=_ANY_ALIGNMENT,
)
def _select_topk(
    scores, table, contexts, starts, slots, counts,
    first_token, table_stride, score_stride, rows, count,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, RATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens of the chunk)."""
    pdl_begin(PDL)
    token = first_token + tl.program_id(0)
    row, seen = row_and_seen(token, contexts, starts, rows)
    seen = seen // RATE
    topk = tl.minimum(seen, count)
    table += row.to(tl.int64) * table_stride
    scores += tl.program_id(0).to(tl.int64) * score_stride
    slots += token.to(tl.int64) * count
    _write_count(slots, counts + token, topk, count, BLOCK_N)

    least = tl.zeros((), tl.uint32)
    left = topk
    if seen > count:
        for number in tl.static_range(4):
            found_B = _histogram(least, scores, 0, seen, 24 - 8 * number, BLOCK_N)
            least, left = _next_digit(least, left, found_B)
    none = tl.zeros((), tl.int32)
    _write_selected(
        slots, scores, table, 0, seen, none, none, least, left, seen <= count, BLOCK_SIZE, BLOCK_N
    )


_KEYS = 64
_SCORES = 1024
_SEGMENT = 4096
"""Fewest tokens of a context, as the plan bounds it, for each of its segments."""
_MOST_SEGMENTS = 32
_SELECTING_PROGRAMS = 256
"""Programs of a launch with segments: about two for each SM of the largest GPUs."""
_PROGRAMS = 8192
"""Programs of a launch of `_index_scores`."""
_WORKSPACE = 1 << 26
"""Scores of a chunk of tokens: 256 MiB."""


def _supports(
    q_TGI: Tensor, weights_TG: Tensor, keys: IndexKeys, plan: AttentionPlan, count: int, rate: int = 1
) -> bool:
    if INTERPRETED and q_TGI.dtype == torch.bfloat16:
        return False  # the interpreter's bfloat16 tl.dot is wrong
    _, heads, width = q_TGI.shape
    return heads <= 128 and width <= 128 and q_TGI.stride(2) == weights_TG.stride(1) == 1


@index_topk.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _index_topk(
    q_TGI: Tensor, weights_TG: Tensor, keys: IndexKeys, plan: AttentionPlan, count: int, rate: int = 1
) -> TopKIndices:
    tokens = len(q_TGI)
    longest = plan.max_context_len // rate
    slots_TJ = torch.empty(tokens, count, dtype=torch.int32, device=q_TGI.device)
    counts_T = torch.empty(tokens, dtype=torch.int32, device=q_TGI.device)
    for first, size in _chunks(tokens, longest):
        scores_NS = torch.empty(size, longest, dtype=torch.float32, device=q_TGI.device)
        if longest > count:
            _launch_scores(q_TGI, weights_TG, keys, plan, count, scores_NS, first, rate)
        _launch_topk(scores_NS, keys, plan, count, slots_TJ, counts_T, first, rate)
    return TopKIndices(slots_TJ, counts_T, plan.split_tokens)


def _launch_topk(
    scores_NS: Tensor, keys: IndexKeys, plan: AttentionPlan, count: int, slots_TJ: Tensor, counts_T: Tensor,
    first: int, rate: int,
) -> None:  # fmt: skip
    """Select the slots of tokens `first` … of the step, which have a row of scores each."""
    size, longest = scores_NS.shape
    table = plan.block_table_RW
    table_stride = plan.block_table_RW.stride(0)
    rows = len(plan.context_lens_R)
    segments = min(triton.cdiv(longest, _SEGMENT), _MOST_SEGMENTS, _SELECTING_PROGRAMS // size)
    options = {"BLOCK_N": _SCORES, "RATE": rate, "num_warps": 8, **launch_options(scores_NS.device)}
    if longest <= count or segments < 2:
        _select_topk[(size,)](
            scores_NS, table, plan.context_lens_R, plan.query_starts_R1, slots_TJ, counts_T,
            first, table_stride, longest, rows, count, BLOCK_SIZE=keys.keys.shape[1], **options,
        )  # fmt: skip
        return
    options["BLOCK_S"] = triton.next_power_of_2(segments)
    histograms = scores_NS.new_empty(size, 4, segments, 256, dtype=torch.int32)
    states = scores_NS.new_empty(size, 4, 2, dtype=torch.int32)
    for number in range(4):
        _count_digits[(size, segments)](
            scores_NS, plan.context_lens_R, plan.query_starts_R1, histograms, states,
            first, longest, rows, count, PASS=number, **options,
        )  # fmt: skip
    _write_topk[(size, segments)](
        scores_NS, table, plan.context_lens_R, plan.query_starts_R1, histograms, states, slots_TJ, counts_T,
        first, table_stride, longest, rows, count, BLOCK_SIZE=keys.keys.shape[1], **options,
    )  # fmt: skip


def _launch_scores(
    q_TGI: Tensor, weights_TG: Tensor, keys: IndexKeys, plan: AttentionPlan, count: int,
    scores_NS: Tensor, first: int, rate: int,
) -> None:  # fmt: skip
    _, heads, width = q_TGI.shape
    size, longest = scores_NS.shape
    block_heads, block_width = (max(triton.next_power_of_2(each), 16) for each in (heads, width))
    scaled = keys.scale is not None

    def tile_bytes(count: int) -> int:
        codes = count * block_width if scaled else 0
        return product_bytes(block_heads, count, block_width, q_TGI.dtype) + codes

    block = fitting_block(_KEYS, tile_bytes, q_TGI.device)
    programs = max(1, min(_PROGRAMS // size, triton.cdiv(longest, block)))
    _index_scores[(size, programs)](
        q_TGI, weights_TG,
        keys.keys.view(torch.uint8) if scaled else keys.keys,
        # Without scales the kernel ignores this argument.
        keys.scale if scaled else plan.context_lens_R,
        plan.block_table_RW, plan.context_lens_R, plan.query_starts_R1, scores_NS,
        first, *q_TGI.stride()[:2], weights_TG.stride(0), plan.block_table_RW.stride(0), longest,
        len(plan.context_lens_R), count,
        HEADS=heads, WIDTH=width, BLOCK_SIZE=keys.keys.shape[1],
        BLOCK_G=block_heads, BLOCK_I=block_width, BLOCK_N=block, SCALED=scaled, RATE=rate, num_warps=4,
        num_stages=2, **launch_options(q_TGI.device),
    )  # fmt: skip


def _chunks(tokens: int, longest: int) -> Iterator[tuple[int, int]]:
    """(first token, number of tokens) of chunks whose scores fit in the workspace."""
    step = max(_WORKSPACE // max(longest, 1), 1)
    return ((first, min(step, tokens - first)) for first in range(0, tokens, step))


@sparse_latent_attention.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda q_THK, cache, topk, scale: supports_latents(q_THK, cache),
)
def _sparse_latent_attention(q_THK: Tensor, cache: LatentLayer, topk: TopKIndices, scale: float) -> Tensor:
    blocks_of_one = LatentLayer(
        cache.rows.flatten(0, 1).unsqueeze(1),
        cache.latent_width,
        None if cache.scale is None else cache.scale.view(-1, 1),
    )
    return attend_latents(q_THK, blocks_of_one, _plan_from(topk), scale)


def _plan_from(topk: TopKIndices) -> AttentionPlan:
    """A plan with a row for each token, whose context is its top-k tokens."""
    tokens, most = topk.slots_TJ.shape
    return AttentionPlan(
        topk.slots_TJ,
        topk.counts_T,
        torch.arange(tokens + 1, dtype=torch.int32, device=topk.slots_TJ.device),
        num_tokens=tokens,
        min_query_len=1,
        max_query_len=1,
        max_context_len=most,
        split_tokens=topk.split_tokens,
        is_step_input=False,
    )
