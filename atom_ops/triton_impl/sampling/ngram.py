"""N-gram proposals: a search of the text in chunks, then the drafts.

search_text    a program for a row and a chunk of its text; the best match of all chunks is the largest
               key: length of the match, then the earliest or the latest place
_propose       a program for a row
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.sampling.draft_inputs import NO_DRAFT, RowState
from atom_ops.ops.sampling.ngram import NgramRule, TokenHistory, propose_ngrams
from atom_ops.triton_impl.hardware.target import INTERPRETED, NEEDS, runs_on

CHUNK = 64 if INTERPRETED else 4096
"""Tokens of a program; a row of a graph has programs for the longest text, and most of them end at once."""
BLOCK = min(CHUNK, 1024)
_NONE = tl.constexpr(NO_DRAFT)
NO_TOKEN = tl.constexpr(-1)
_PLACE_BITS = 40
"""Bits of a key below the length of the match: more than any position needs."""
ONE_MATCH = tl.constexpr(1 << _PLACE_BITS)
LAST_PLACE = tl.constexpr((1 << _PLACE_BITS) - 1)


@triton.jit
def text_token(
    at, wanted, length, last, last_id, table, prediction, ids,
    BLOCK_SIZE: tl.constexpr, REACH: tl.constexpr, PREDICTIONS: tl.constexpr,
):  # fmt: skip
    """The tokens at these places of a row's text; -1 where there is none."""
    position = at - length
    inside = wanted & (position >= 0) & (position < last)
    if REACH > 0:
        inside = inside & (position > last - REACH)
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    token = tl.load(ids + block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside, other=NO_TOKEN)
    if PREDICTIONS:
        predicted = wanted & (at >= 0) & (position < 0)
        token = tl.where(predicted, tl.load(prediction + at, mask=predicted, other=NO_TOKEN), token)
    return tl.where(wanted & (position == last), last_id.to(tl.int32), token)


@triton.jit
def search_text(
    rows_ptr, ids_ptr, positions_ptr, table_ptr, predictions_ptr, lengths_ptr, slot_ids_ptr, keys_out,
    prediction_stride,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, REACH: tl.constexpr, PREDICTIONS: tl.constexpr,
    LONGEST: tl.constexpr, SHORTEST: tl.constexpr, LATEST: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R, chunks)."""
    row = tl.load(rows_ptr + tl.program_id(0))
    last = tl.load(positions_ptr + row)
    last_id = tl.load(ids_ptr + row)
    length = tl.load(lengths_ptr + row)
    end = length + last
    first = tl.program_id(1).to(tl.int64) * CHUNK
    if (last < 0) | (first >= end):
        return
    table = table_ptr + row * WIDTH
    prediction = predictions_ptr + row * prediction_stride
    best = tl.zeros((), tl.int64)
    for start in range(first, tl.minimum(first + CHUNK, end), BLOCK):
        at_B = start + tl.arange(0, BLOCK)
        same_B = at_B < end
        matched_B = tl.zeros((BLOCK,), tl.int64)
        back = 0
        while (back < LONGEST) & (tl.max(same_B.to(tl.int32), 0) > 0):
            wanted = text_token(
                end - back, end >= back, length, last, last_id, table, prediction, slot_ids_ptr,
                BLOCK_SIZE, REACH, PREDICTIONS,
            )  # fmt: skip
            token_B = text_token(
                at_B - back, same_B & (at_B >= back), length, last, last_id, table, prediction, slot_ids_ptr,
                BLOCK_SIZE, REACH, PREDICTIONS,
            )  # fmt: skip
            same_B = same_B & (token_B == wanted) & (wanted >= 0)
            matched_B += same_B.to(tl.int64)
            back += 1
        place_B = at_B.to(tl.int64)
        key_B = matched_B * ONE_MATCH + (place_B if LATEST else LAST_PLACE - place_B)
        best = tl.maximum(best, tl.max(tl.where(matched_B >= SHORTEST, key_B, 0), 0))
    if best > 0:
        tl.atomic_max(keys_out + tl.program_id(0), best)


@triton.jit
def _propose(
    rows_ptr, ids_ptr, positions_ptr, limits_ptr, drafts_ptr, table_ptr, predictions_ptr, lengths_ptr,
    slot_ids_ptr, keys_ptr, prediction_stride, drafts_stride,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, REACH: tl.constexpr, PREDICTIONS: tl.constexpr,
    DRAFTS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (R)."""
    row = tl.load(rows_ptr + tl.program_id(0))
    last = tl.load(positions_ptr + row)
    last_id = tl.load(ids_ptr + row)
    length = tl.load(lengths_ptr + row)
    limit = tl.load(limits_ptr + row)
    key = tl.load(keys_ptr + tl.program_id(0))
    found = LAST_PLACE - (key & LAST_PLACE)
    k = tl.arange(0, BLOCK_K)
    at_K = found + 1 + k
    used_K = (key > 0) & (at_K <= length + last) & (k < limit - 2 - last) & (last >= 0) & (k < DRAFTS)
    table = table_ptr + row * WIDTH
    prediction = predictions_ptr + row * prediction_stride
    token_K = text_token(
        at_K, used_K, length, last, last_id, table, prediction, slot_ids_ptr, BLOCK_SIZE, REACH, PREDICTIONS
    )
    draft_K = tl.where(used_K, token_K.to(tl.int64), _NONE)
    tl.store(drafts_ptr + row * drafts_stride + k, draft_K, mask=k < DRAFTS)


def text_of(history: TokenHistory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What kernels read the rows' texts from."""
    return history.table_NW, history.predictions_NP, history.prediction_lens_N, history.ids_S


def text_constants(history: TokenHistory) -> dict[str, int | bool]:
    """What is constant for them."""
    return {
        "WIDTH": history.table_NW.shape[1],
        "BLOCK_SIZE": history.block_size,
        "REACH": history.reach,
        "PREDICTIONS": history.predictions_NP.shape[1] > 0,
    }


@propose_ngrams.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda rows_R, state, history, rule, max_positions: (
        history.table_NW.is_contiguous() and history.predictions_NP.stride(1) == 1
    ),
)
def _launch(
    rows_R: Tensor, state: RowState, history: TokenHistory, rule: NgramRule, max_positions: int
) -> Tensor:
    rows = len(rows_R)
    drafts = state.drafts_NK.shape[1]
    predictions = history.predictions_NP
    keys_R = torch.zeros_like(rows_R)
    text = text_of(history)
    constants = text_constants(history)
    if rows:
        chunks = triton.cdiv(predictions.shape[1] + max_positions, CHUNK)
        search_text[(rows, chunks)](
            rows_R, state.ids_N, state.positions_N, *text, keys_R, predictions.stride(0),
            LONGEST=rule.longest, SHORTEST=rule.shortest, LATEST=False, CHUNK=CHUNK, BLOCK=BLOCK,
            **constants,
        )  # fmt: skip
        _propose[(rows,)](
            rows_R, state.ids_N, state.positions_N, state.limits_N, state.drafts_NK, *text, keys_R,
            predictions.stride(0), state.drafts_NK.stride(0),
            DRAFTS=drafts, BLOCK_K=triton.next_power_of_2(drafts), num_warps=1, **constants,
        )  # fmt: skip
    return state.drafts_NK
