"""Keys and values of whole prompts from a float8 cache, in the queries' dtype and the order of the step.

    gathered [T, 2, K, E]      the rows of other tokens are not initialised

A long prompt reads its keys and values once for every tile of its queries: converting them once is faster.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.attention.kv_cache import KVLayer
from atom_ops.triton_impl.attention.query_tiles import QueryTiles
from atom_ops.triton_impl.quantized.fp8 import decode_fp8

_TOKENS = 8
_CHUNK = 2048


def gather_prompts(cache: KVLayer, plan: AttentionPlan, listed: QueryTiles, dtype: torch.dtype) -> Tensor:
    """Keys and values of the tokens of the listed tiles, which must be of whole prompts."""
    assert cache.scale is not None
    kv_heads, width = cache.kv.shape[3:]
    gathered = torch.empty(plan.num_tokens, 2, kv_heads, width, dtype=dtype, device=cache.kv.device)
    slot = 2 * kv_heads * width
    _gather[(len(listed.tiles_N4), triton.cdiv(listed.length, _TOKENS))](
        cache.kv.view(torch.uint8),
        cache.scale,
        plan.block_table_RW,
        listed.tiles_N4,
        listed.count,
        gathered,
        plan.block_table_RW.stride(0),
        BLOCK_SIZE=cache.kv.shape[1],
        SLOT=slot,
        WIDTH=width,
        TOKENS=_TOKENS,
        CHUNK=min(triton.next_power_of_2(slot), _CHUNK),
    )
    return gathered


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table", "scales", "tiles", "count"],
)
def _gather(
    kv, scales, table, tiles, count, gathered, table_stride,
    BLOCK_SIZE: tl.constexpr, SLOT: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, programs of a tile)."""
    number = tl.program_id(0)
    if number >= tl.load(count):
        return
    row = tl.load(tiles + number * 4)
    first_token = tl.load(tiles + number * 4 + 1).to(tl.int64)
    queries = tl.load(tiles + number * 4 + 2)
    before = tl.load(tiles + number * 4 + 3)
    table += row.to(tl.int64) * table_stride
    offset_T = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    exists_T = offset_T < queries
    token_T = before + offset_T
    block_T = tl.load(table + token_T // BLOCK_SIZE, mask=exists_T, other=0).to(tl.int64)
    slot_T = block_T * BLOCK_SIZE + token_T % BLOCK_SIZE
    to_T = first_token + offset_T
    for chunk in tl.static_range(0, SLOT, CHUNK):
        at_P = chunk + tl.arange(0, CHUNK)
        wanted_TP = exists_T[:, None] & (at_P < SLOT)[None, :]
        x_TP = tl.load(kv + slot_T[:, None] * SLOT + at_P[None, :], mask=wanted_TP, other=0)
        scale_at_TP = slot_T[:, None] * (SLOT // WIDTH) + (at_P // WIDTH)[None, :]
        scale_TP = tl.load(scales + scale_at_TP, mask=wanted_TP, other=0.0)
        x_TP = (decode_fp8(x_TP, tl.float32) * scale_TP).to(gathered.dtype.element_ty)
        tl.store(gathered + to_T[:, None] * SLOT + at_P[None, :], x_TP, mask=wanted_TP)
