"""Suffix proposals: searches of the rows' texts and of recent outputs in chunks, then the drafts.

search_text        as for n-grams, with the latest place
_search_outputs    a program for a row and a chunk of the recent outputs; keys as those of a text
_propose           a program for a row
_record            one program, as each row's place depends on the rows before it
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.sampling.draft_inputs import NO_DRAFT, RowState
from atom_ops.ops.sampling.ngram import NgramRule, TokenHistory
from atom_ops.ops.sampling.suffix import NO_NUMBER, PRIVATE, RecentOutputs, propose_suffixes, record_outputs
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on
from atom_ops.triton_impl.sampling.ngram import (
    BLOCK,
    CHUNK,
    LAST_PLACE,
    NO_TOKEN,
    ONE_MATCH,
    search_text,
    text_constants,
    text_of,
    text_token,
)

_NO_DRAFT = tl.constexpr(NO_DRAFT)
_NO_NUMBER = tl.constexpr(NO_NUMBER)
_PRIVATE = tl.constexpr(PRIVATE)
_RECORD_BLOCK = 1024
"""Tokens, added or not, that `_record` has in registers."""


@triton.jit
def _search_outputs(
    rows_ptr, ids_ptr, positions_ptr, table_ptr, predictions_ptr, lengths_ptr, slot_ids_ptr,
    recent_ids_ptr, before_ptr, after_ptr, total_ptr, last_ptr, keys_out, prediction_stride,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, REACH: tl.constexpr, PREDICTIONS: tl.constexpr,
    TOKENS: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R, chunks). Places are counted from the oldest token on."""
    row = tl.load(rows_ptr + tl.program_id(0))
    last = tl.load(positions_ptr + row)
    last_id = tl.load(ids_ptr + row)
    length = tl.load(lengths_ptr + row)
    end = length + last
    total = tl.load(total_ptr)
    oldest = tl.maximum(total - TOKENS, 0)
    first = oldest + tl.program_id(1).to(tl.int64) * CHUNK
    if (last < 0) | (first >= total) | (tl.load(last_ptr + row) == _PRIVATE):
        return
    table = table_ptr + row * WIDTH
    prediction = predictions_ptr + row * prediction_stride
    best = tl.zeros((), tl.int64)
    for start in range(first, tl.minimum(first + CHUNK, total), BLOCK):
        number_B = start + tl.arange(0, BLOCK)
        at_B = number_B
        same_B = number_B < total
        matched_B = tl.zeros((BLOCK,), tl.int64)
        back = 0
        while (back < LONGEST) & (tl.max(same_B.to(tl.int32), 0) > 0):
            wanted = text_token(
                end - back, end >= back, length, last, last_id, table, prediction, slot_ids_ptr,
                BLOCK_SIZE, REACH, PREDICTIONS,
            )  # fmt: skip
            token_B = tl.load(recent_ids_ptr + at_B % TOKENS, mask=same_B, other=NO_TOKEN)
            same_B = same_B & (token_B == wanted) & (wanted >= 0)
            matched_B += same_B.to(tl.int64)
            at_B = tl.load(before_ptr + at_B % TOKENS, mask=same_B, other=_NO_NUMBER)
            same_B = same_B & (at_B >= oldest)
            back += 1
        found_B = matched_B >= SHORTEST
        after_B = tl.load(after_ptr + number_B % TOKENS, mask=found_B, other=_NO_NUMBER)
        key_B = matched_B * ONE_MATCH + (number_B - oldest)
        best = tl.maximum(best, tl.max(tl.where(found_B & (after_B >= 0), key_B, 0), 0))
    if best > 0:
        tl.atomic_max(keys_out + tl.program_id(0), best)


@triton.jit
def _propose(
    rows_ptr, ids_ptr, positions_ptr, limits_ptr, drafts_ptr, table_ptr, predictions_ptr, lengths_ptr,
    slot_ids_ptr, recent_ids_ptr, after_ptr, total_ptr, own_keys_ptr, keys_ptr,
    prediction_stride, drafts_stride,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, REACH: tl.constexpr, PREDICTIONS: tl.constexpr,
    TOKENS: tl.constexpr, DRAFTS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (R)."""
    row = tl.load(rows_ptr + tl.program_id(0))
    last = tl.load(positions_ptr + row)
    last_id = tl.load(ids_ptr + row)
    length = tl.load(lengths_ptr + row)
    limit = tl.load(limits_ptr + row)
    own = tl.load(own_keys_ptr + tl.program_id(0))
    other = tl.load(keys_ptr + tl.program_id(0))
    is_own = own // ONE_MATCH >= other // ONE_MATCH
    key = tl.where(is_own, own, other)
    k = tl.arange(0, BLOCK_K)
    used_K = (k < tl.minimum(key // ONE_MATCH, limit - 2 - last)) & (last >= 0) & (k < DRAFTS)
    place = key & LAST_PLACE
    table = table_ptr + row * WIDTH
    prediction = predictions_ptr + row * prediction_stride
    at_K = place + 1 + k
    inside_K = is_own & (at_K <= length + last)
    token_K = text_token(
        at_K, inside_K, length, last, last_id, table, prediction, slot_ids_ptr, BLOCK_SIZE, REACH, PREDICTIONS
    )
    token_K = tl.where(inside_K, token_K, NO_TOKEN)
    number = place + tl.maximum(tl.load(total_ptr) - TOKENS, 0)
    follows = (is_own == 0) & (key > 0)
    for index in range(DRAFTS):
        number = tl.load(after_ptr + number % TOKENS, mask=follows, other=_NO_NUMBER)
        follows = follows & (number >= 0)
        token = tl.load(recent_ids_ptr + number % TOKENS, mask=follows, other=NO_TOKEN)
        token_K = tl.where((k == index) & follows, token, token_K)
    known = tl.min(tl.where(token_K < 0, k, BLOCK_K), 0)
    draft_K = tl.where(used_K & (k < known), token_K.to(tl.int64), _NO_DRAFT)
    tl.store(drafts_ptr + row * drafts_stride + k, draft_K, mask=k < DRAFTS)


@triton.jit
def _added(counts_ptr, rows_ptr, last_ptr, r, rows):
    """Row, number of its last token and how many are added, of the rows with these indices."""
    row_R = tl.load(rows_ptr + r, mask=r < rows, other=0)
    last_R = tl.load(last_ptr + row_R, mask=r < rows, other=_PRIVATE)
    count_R = tl.load(counts_ptr + r, mask=last_R != _PRIVATE, other=0)
    return row_R, last_R, count_R


@triton.jit
def _record(
    ids_ptr, counts_ptr, rows_ptr, recent_ids_ptr, before_ptr, after_ptr, total_ptr, last_ptr, rows,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Grid (1)."""
    total = tl.load(total_ptr)
    end = total
    for first in range(0, rows, BLOCK_R):
        _, _, count_R = _added(counts_ptr, rows_ptr, last_ptr, first + tl.arange(0, BLOCK_R), rows)
        end += tl.sum(count_R, 0)
    oldest = tl.maximum(end - TOKENS, 0)
    j = tl.arange(0, BLOCK_J)[None, :]
    for first in range(0, rows, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        row_R, last_R, count_R = _added(counts_ptr, rows_ptr, last_ptr, r, rows)
        tl.debug_barrier()  # all warps have read before one writes
        start_R = total + tl.cumsum(count_R, 0) - count_R
        number_RJ = start_R[:, None] + j
        added_RJ = j < count_R[:, None]
        place_RJ = number_RJ % TOKENS
        id_RJ = tl.load(ids_ptr + r[:, None] * WIDTH + j, mask=added_RJ, other=0)
        before_RJ = tl.where(j == 0, last_R[:, None], number_RJ - 1)
        after_RJ = tl.where(j + 1 < count_R[:, None], number_RJ + 1, _NO_NUMBER)
        tl.store(recent_ids_ptr + place_RJ, id_RJ.to(tl.int32), mask=added_RJ)
        tl.store(before_ptr + place_RJ, before_RJ, mask=added_RJ)
        tl.store(after_ptr + place_RJ, after_RJ, mask=added_RJ)
        adds_R = count_R > 0
        tl.store(after_ptr + last_R % TOKENS, start_R, mask=adds_R & (last_R >= oldest))
        tl.store(last_ptr + row_R, start_R + count_R - 1, mask=adds_R)
        total += tl.sum(count_R, 0)
    tl.debug_barrier()
    tl.store(total_ptr, total)


@record_outputs.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda ids_RJ, counts_R, rows_R, recent: ids_RJ.is_contiguous() and counts_R.is_contiguous(),
)
def _launch_record(ids_RJ: Tensor, counts_R: Tensor, rows_R: Tensor, recent: RecentOutputs) -> Tensor:
    rows, width = ids_RJ.shape
    if rows:
        block_j = triton.next_power_of_2(width)
        block_r = min(triton.next_power_of_2(rows), max(_RECORD_BLOCK // block_j, 1))
        _record[(1,)](
            ids_RJ, counts_R, rows_R, recent.ids_O, recent.before_O, recent.after_O, recent.total_1,
            recent.last_N, rows,
            TOKENS=len(recent.ids_O), WIDTH=width, BLOCK_R=block_r, BLOCK_J=block_j,
        )  # fmt: skip
    return recent.total_1


@propose_suffixes.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda rows_R, state, history, recent, rule, max_positions: (
        history.table_NW.is_contiguous() and history.predictions_NP.stride(1) == 1
    ),
)
def _launch_propose(
    rows_R: Tensor,
    state: RowState,
    history: TokenHistory,
    recent: RecentOutputs,
    rule: NgramRule,
    max_positions: int,
) -> Tensor:
    rows = len(rows_R)
    drafts = state.drafts_NK.shape[1]
    tokens = len(recent.ids_O)
    predictions = history.predictions_NP
    own_keys_R, keys_R = torch.zeros(2, rows, dtype=torch.int64, device=rows_R.device)
    lengths = {"LONGEST": rule.longest, "SHORTEST": rule.shortest, "CHUNK": CHUNK, "BLOCK": BLOCK}
    if rows:
        search_text[(rows, triton.cdiv(predictions.shape[1] + max_positions, CHUNK))](
            rows_R, state.ids_N, state.positions_N, *text_of(history), own_keys_R, predictions.stride(0),
            LATEST=True, **lengths, **text_constants(history),
        )  # fmt: skip
        _search_outputs[(rows, triton.cdiv(tokens, CHUNK))](
            rows_R, state.ids_N, state.positions_N, *text_of(history), recent.ids_O, recent.before_O,
            recent.after_O, recent.total_1, recent.last_N, keys_R, predictions.stride(0),
            TOKENS=tokens, **lengths, **text_constants(history),
        )  # fmt: skip
        _propose[(rows,)](
            rows_R, state.ids_N, state.positions_N, state.limits_N, state.drafts_NK, *text_of(history),
            recent.ids_O, recent.after_O, recent.total_1, own_keys_R, keys_R,
            predictions.stride(0), state.drafts_NK.stride(0),
            TOKENS=tokens, DRAFTS=drafts, BLOCK_K=triton.next_power_of_2(drafts), num_warps=1,
            **text_constants(history),
        )  # fmt: skip
    return state.drafts_NK
