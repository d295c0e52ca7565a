"""Keys and values of long prompts' contexts, in the queries' dtype, token after token.

    gathered [G, 2, K, E]      contexts of as many rows as fit; what is between them is not initialised

A prompt reads its keys and values once for every tile of its queries. Converting those of a float8 cache once
is faster; so is copying from any cache what is too long for the L2 cache, where blocks of 16 tokens cost
translations of addresses. The places of contexts are found on the device, so that a captured graph finds
those of its replay.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.attention.kv_cache import KVLayer
from atom_ops.triton_impl.quantized.fp8 import decode_fp8

FEWEST_QUERIES = 128
"""A context is converted for so many queries of its row: for fewer, that costs more than it saves."""
FEWEST_COPIED = 1024
"""A context is copied for so many queries."""
LEAST_COPIED_BYTES = 64 << 20
"""A context of fewer bytes stays in the L2 cache, and is not copied."""
MOST_BYTES = 512 << 20
"""Gathered contexts take no more memory."""
NOT_GATHERED = tl.constexpr(-(1 << 30))
_SHARE = 64
"""Tokens of a program; each context begins at a multiple."""
_TOKENS = 8
_CHUNK = 2048
_ROWS = 128


@dataclass(frozen=True, slots=True)
class Gathered:
    """What was gathered, and where."""

    kv: Tensor
    origins_R: Tensor
    """int32: token t of row r is at `origins_R[r]` + t of `kv`; NOT_GATHERED for other rows."""


@dataclass(frozen=True, slots=True)
class _Places:
    origins_R: Tensor
    ends_R: Tensor
    """int32: where each gathered context ends in `Gathered.kv`; for other rows, where all before them do."""


@dataclass(frozen=True, slots=True)
class _PlaceContexts:
    """Finds the places of a plan's contexts, as `AttentionPlan.derived` calls it: once for all layers."""

    tokens: int
    fewest_queries: int
    least_tokens: int
    window: int
    block_size: int

    def __call__(self, plan: AttentionPlan) -> _Places:
        rows = len(plan.context_lens_R)
        origins_R, ends_R = torch.empty(2, rows, dtype=torch.int32, device=plan.context_lens_R.device)
        _place[(1,)](
            plan.query_starts_R1, plan.context_lens_R, origins_R, ends_R, rows, self.tokens,
            self.fewest_queries, self.least_tokens,
            WINDOW=self.window, BLOCK_SIZE=self.block_size, SHARE=_SHARE, ROWS=_ROWS,
        )  # fmt: skip
        return _Places(origins_R, ends_R)


def gather_contexts(cache: KVLayer, plan: AttentionPlan, dtype: torch.dtype, window: int) -> Gathered | None:
    """The contexts of rows of many queries, as far as these see them; None if no row has a place."""
    _, block_size, _, kv_heads, width = cache.kv.shape
    slot = 2 * kv_heads * width
    fewest, least = FEWEST_QUERIES, 1
    if cache.scale is None:
        fewest, least = FEWEST_COPIED, triton.cdiv(LEAST_COPIED_BYTES, slot * dtype.itemsize)
    longest = plan.max_context_len
    if window:
        longest = min(longest, plan.max_query_len + window + block_size)
    if plan.max_query_len < fewest or longest < least:
        return None
    longest = triton.cdiv(longest, _SHARE) * _SHARE
    rows = len(plan.context_lens_R)
    most = min(rows, plan.num_tokens // fewest)
    tokens = min(MOST_BYTES // (slot * dtype.itemsize) // _SHARE * _SHARE, most * longest)
    if tokens < least:
        return None
    places = plan.derived(_PlaceContexts(tokens, fewest, least, window, block_size))
    kv = torch.empty(tokens, 2, kv_heads, width, dtype=dtype, device=cache.kv.device)
    _gather[(triton.cdiv(tokens, _SHARE),)](
        cache.kv if cache.scale is None else cache.kv.view(torch.uint8),
        cache.scale,
        plan.block_table_RW,
        places.origins_R,
        places.ends_R,
        plan.context_lens_R,
        kv,
        plan.block_table_RW.stride(0),
        rows,
        BLOCK_SIZE=block_size,
        SLOT=slot,
        WIDTH=width,
        SHARE=_SHARE,
        TOKENS=_TOKENS,
        CHUNK=min(triton.next_power_of_2(slot), _CHUNK),
        ROWS=_ROWS,
    )
    return Gathered(kv, places.origins_R)


@triton.jit(
    do_not_specialize=["rows", "tokens", "fewest_queries", "least_tokens"],
    do_not_specialize_on_alignment=["starts", "contexts", "origins", "ends"],
)
def _place(
    starts, contexts, origins, ends, rows, tokens, fewest_queries, least_tokens,
    WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (1,). A context that would not fit alone takes no place; of the others the first ones fit."""
    before = 0
    for first in range(0, rows, ROWS):
        row_R = first + tl.arange(0, ROWS)
        exists_R = row_R < rows
        start_R = tl.load(starts + row_R, mask=exists_R, other=0)
        queries_R = tl.load(starts + row_R + 1, mask=exists_R, other=0) - start_R
        context_R = tl.load(contexts + row_R, mask=exists_R, other=0)
        first_R = tl.zeros_like(context_R)
        if WINDOW > 0:
            first_R = tl.maximum(context_R - queries_R - WINDOW + 1, 0) // BLOCK_SIZE * BLOCK_SIZE
        taken_R = tl.cdiv(context_R - first_R, SHARE) * SHARE
        is_wanted_R = (queries_R >= fewest_queries) & (taken_R >= least_tokens) & (taken_R <= tokens)
        taken_R = tl.where(is_wanted_R, taken_R, 0)
        end_R = before + tl.cumsum(taken_R, 0)
        place_R = end_R - taken_R
        fits_R = (taken_R > 0) & (end_R <= tokens)
        tl.store(origins + row_R, tl.where(fits_R, place_R - first_R, NOT_GATHERED), mask=exists_R)
        tl.store(ends + row_R, tl.where(fits_R, end_R, tl.minimum(place_R, tokens)), mask=exists_R)
        before = tl.minimum(before + tl.sum(taken_R, 0), tokens)  # no overflow, and nothing more fits


@triton.jit(
    do_not_specialize=["table_stride", "rows"],
    do_not_specialize_on_alignment=["table", "scales", "origins", "ends", "contexts"],
)
def _gather(
    kv, scales, table, origins, ends, contexts, gathered, table_stride, rows,
    BLOCK_SIZE: tl.constexpr, SLOT: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr,
    TOKENS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (shares of the gathered tokens,)."""
    place = tl.program_id(0) * SHARE
    # The row whose context ends after `place` and not before it: ends do not fall from row to row.
    row = 0
    for first in range(0, rows, ROWS):
        row_R = first + tl.arange(0, ROWS)
        end_R = tl.load(ends + row_R, mask=row_R < rows, other=(1 << 30))
        row += tl.sum((end_R <= place).to(tl.int32), 0)
    if row >= rows:
        return
    origin = tl.load(origins + row)
    if origin == NOT_GATHERED:
        return
    context = tl.load(contexts + row)
    table += tl.cast(row, tl.int64) * table_stride
    for offset in range(0, SHARE, TOKENS):
        place_T = place + offset + tl.arange(0, TOKENS)
        token_T = place_T - origin
        exists_T = token_T < context
        block_T = tl.load(table + token_T // BLOCK_SIZE, mask=exists_T, other=0).to(tl.int64)
        slot_T = block_T * BLOCK_SIZE + token_T % BLOCK_SIZE
        to_T = place_T.to(tl.int64) * SLOT
        for chunk in tl.static_range(0, SLOT, CHUNK):
            at_P = chunk + tl.arange(0, CHUNK)
            wanted_TP = exists_T[:, None] & (at_P < SLOT)[None, :]
            x_TP = tl.load(kv + slot_T[:, None] * SLOT + at_P[None, :], mask=wanted_TP, other=0)
            if scales is not None:
                scale_at_TP = slot_T[:, None] * (SLOT // WIDTH) + (at_P // WIDTH)[None, :]
                scale_TP = tl.load(scales + scale_at_TP, mask=wanted_TP, other=0.0)
                x_TP = (decode_fp8(x_TP, tl.float32) * scale_TP).to(gathered.dtype.element_ty)
            tl.store(gathered + to_T[:, None] + at_P[None, :], x_TP, mask=wanted_TP)
