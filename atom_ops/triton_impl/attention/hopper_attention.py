"""Prompt attention on Hopper: WGMMA, fed by TMA from the paged cache.

One program runs on each SM and computes one item after the other: the query heads of one tile of tokens
that share keys and values, as many as a power of two divides. It is warp-specialized:

    keys        1 or 2     takes the next item, announces it, loads its queries and keys (TMA)
    values      1 or 2     loads its values, and zeroes those that no query sees
    consumers   2 x 4      64 queries each; the scores of a tile overlap with the product of the
                           previous tile's weights and values

A tile of keys or values is a whole number of blocks of the cache, each of which arrives in pieces of 64
features, as wide as shared memory is swizzled:

    keys, values    [stages, pieces of a head, blocks of a tile, tokens of a block, 64]

From a float8 cache two warps each convert keys and values on their way (`hopper_float8`), which takes nearly
twice as long; those of long prompts were converted before (`gathered_contexts`), and a tile of them is one
block. Written in Gluon, which has no interpreter. Other devices run these rows in `attention_kernels`.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom_ops.ops.attention.attention import AttentionRule
from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.attention.kv_cache import KVLayer
from atom_ops.triton_impl.attention.gathered_contexts import NOT_GATHERED, Gathered
from atom_ops.triton_impl.attention.hopper_float8 import (
    CODE_ROWS,
    CODES,
    PIECE,
    SWIZZLED,
    copy_float8,
    make_float8,
    slots_of,
)
from atom_ops.triton_impl.attention.query_tiles import QueryTiles
from atom_ops.triton_impl.hardware.device_state import kept
from atom_ops.triton_impl.hardware.hopper_pipeline import load_tile, make_barriers, release, thread_barrier
from atom_ops.triton_impl.hardware.target import is_hopper

_TILE = 128
"""Query heads x tokens of an item, and tokens of a tile of keys."""
_HALF = 64
"""Queries of one group of consumer warps: the rows of a WGMMA."""
_STAGES = 2
_ITEMS = 2
"""Items that can be announced before all warps have read the first of them."""
_BLOCK_SIZES = (16, 32, 64, 128)
_LOG2_E = gl.constexpr(1.4426950408889634)
# The running maximum before any score: finite, because inf - inf would be NaN.
_LOWEST = gl.constexpr(-1.0e30)
_HEADS_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
_PERIOD = gl.constexpr(8)
"""Tokens after which the swizzle repeats."""
_FIELDS = gl.constexpr(5)
"""Numbers of an item, as `_receive` returns them."""
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def supports(q_THE: Tensor, cache: KVLayer, rule: AttentionRule) -> bool:
    """Whether `attend` computes such queries."""
    width = q_THE.shape[2]
    return (
        q_THE.dtype in (torch.bfloat16, torch.float16)
        and width in (64, 128)
        and not rule.soft_cap
        and not rule.chunked
        and q_THE.stride(1) == width
        and q_THE.stride(0) % 8 == q_THE.data_ptr() % 16 == 0
        and (cache.scale is not None or cache.kv.dtype == q_THE.dtype)
        and cache.kv.shape[1] in _BLOCK_SIZES
        and cache.kv.is_contiguous()
        and is_hopper(q_THE.device)
    )


def tile_length(heads: int, kv_heads: int) -> int:
    """Tokens of an item."""
    return _TILE // _heads_together(heads, kv_heads)


def _heads_together(heads: int, kv_heads: int) -> int:
    """Query heads of an item: the largest power of two that divides a group."""
    group = heads // kv_heads
    return min(group & -group, _HALF)


@gluon.jit
def _announce(items, barriers, number, fields, ITEMS: gl.constexpr):
    """Hand item `number` of this program, `fields`, to the other warps."""
    ready, free = barriers
    slot = number % ITEMS
    mbarrier.wait(free.index(slot), (number // ITEMS % 2) ^ 1)
    for i in gl.static_range(_FIELDS):
        field = gl.full([1], fields[i], gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        items.index(slot * _FIELDS + i).store(field)
    release(ready.index(slot))


@gluon.jit
def _field(items, at):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(items.index(at).load(layout), 0)


@gluon.jit
def _receive(items, barriers, number, ITEMS: gl.constexpr):
    """Wait for item `number`: its head, row, first token, queries (0: there are no more), first position."""
    ready, free = barriers
    slot = number % ITEMS
    mbarrier.wait(ready.index(slot), number // ITEMS % 2)
    at = slot * _FIELDS
    head = _field(items, at)
    row = _field(items, at + 1)
    token = _field(items, at + 2)
    queries, position = _field(items, at + 3), _field(items, at + 4)
    release(free.index(slot))
    return head, row, token, queries, position


@gluon.jit
def _oldest(position, WINDOW: gl.constexpr):
    """The first token that a query at `position` sees."""
    return gl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0


@gluon.jit
def _keys_of(queries, position, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """Where the first tile of an item's keys begins, where its keys end, and its tiles."""
    start = _oldest(position, WINDOW) // BLOCK_SIZE * BLOCK_SIZE
    stop = position + queries
    return start, stop, (stop - start + TILE - 1) // TILE


@gluon.jit
def _wait_until_free(barrier, used):
    """Wait for a stage that has been filled `used` times to be read as often.

    A barrier tells one phase from the one before only: no warp may be so late that another has filled the
    stage again.
    """
    mbarrier.wait(barrier, (used % 2) ^ 1)
    if gl.num_warps() > 1:
        thread_barrier()


@gluon.jit
def _load_kv(
    kv_desc, tiles, stage, barrier, slots, column,
    PIECES: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Load one tile of the head at `column` of a slot's numbers."""
    BLOCKS: gl.constexpr = TILE // BLOCK_SIZE
    mbarrier.expect(barrier, PIECES * BLOCKS * kv_desc.block_type.nbytes)
    for piece in gl.static_range(PIECES):
        for i in gl.static_range(BLOCKS):
            at = (stage * PIECES + piece) * BLOCKS + i
            load_tile(kv_desc, [slots[i], column + piece * PIECE], barrier, tiles.index(at))


@gluon.jit
def _load_keys(
    kv_desc, keys, barriers, table, origin, loaded, column, start, stop, num_tiles, num_slots,
    WIDTH: gl.constexpr, PAGED: gl.constexpr, BLOCK: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the keys of one item in blocks of BLOCK tokens, the last tile first; returns `loaded` after it."""
    keys_ready, keys_free = barriers
    PIECES: gl.constexpr = WIDTH // PIECE
    blocks = keys._reinterpret(keys.dtype, [STAGES * PIECES * (TILE // BLOCK), BLOCK, PIECE], SWIZZLED)
    at = start + (num_tiles - 1) * TILE
    slots = slots_of(table, origin, at, stop, num_slots, PAGED, BLOCK, BLOCK_SIZE, TILE)
    for _tile in range(num_tiles):
        stage = loaded % STAGES
        _wait_until_free(keys_free.index(stage), loaded // STAGES)
        _load_kv(kv_desc, blocks, stage, keys_ready.index(stage), slots, column, PIECES, BLOCK, TILE)
        at -= TILE
        slots = slots_of(table, origin, at, stop, num_slots, PAGED, BLOCK, BLOCK_SIZE, TILE)
        loaded += 1
    return loaded


@gluon.jit
def _copy_keys(
    q_desc, kv_desc, gathered_desc, q, keys, items, item_barriers, q_barriers, key_barriers, float8,
    counter, tiles, count, table, origins, table_stride, num_slots, num_gathered,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, TOGETHER: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, ITEMS: gl.constexpr,
    WINDOW: gl.constexpr, SCALED: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """Take items until there are none, and load their queries and keys.

    The last tile comes first: it holds the queries' own tokens, so that it alone is masked always.
    """
    q_ready, q_free = q_barriers
    PIECES: gl.constexpr = WIDTH // PIECE
    SETS: gl.constexpr = HEADS // TOGETHER
    HALF: gl.constexpr = TILE // 2 // TOGETHER
    all_items = gl.load(count) * SETS
    item = gl.atomic_add(counter, 1)
    number, loaded, parts = 0, 0, 0
    while item < all_items:
        entry = tiles + item // SETS * 4
        row = gl.load(entry)
        token = gl.load(entry + 1)
        queries = gl.load(entry + 2)
        position = gl.load(entry + 3)
        head = item % SETS * TOGETHER
        # Taken long before it is needed, so that nothing waits for it.
        item = gl.atomic_add(counter, 1)
        _announce(items, item_barriers, number, (head, row, token, queries, position), ITEMS)
        start, stop, num_tiles = _keys_of(queries, position, BLOCK_SIZE, TILE, WINDOW)
        own_table = table + row.to(gl.int64) * table_stride

        mbarrier.wait(q_free, (number % 2) ^ 1)
        mbarrier.expect(q_ready, 2 * PIECES * q_desc.block_type.nbytes)
        for half in gl.static_range(2):
            for piece in gl.static_range(PIECES):
                where = [token + half * HALF, head, piece * PIECE]
                load_tile(q_desc, where, q_ready, q.index(half * PIECES + piece))
        column = head // (HEADS // KV_HEADS) * WIDTH
        origin = gl.load(origins + row) if GATHERED else NOT_GATHERED
        if GATHERED and origin != NOT_GATHERED:
            loaded = _load_keys(
                gathered_desc, keys, key_barriers, own_table, origin, loaded, column, start, stop, num_tiles,
                num_gathered, WIDTH, False, TILE, BLOCK_SIZE, TILE, STAGES,
            )  # fmt: skip
        elif SCALED:
            loaded, parts = copy_float8(
                kv_desc, float8, keys, key_barriers, own_table, loaded, parts, column, start, stop,
                _oldest(position, WINDOW), num_tiles, num_slots,
                2 * KV_HEADS, WIDTH, BLOCK_SIZE, TILE, STAGES,
            )  # fmt: skip
        else:
            loaded = _load_keys(
                kv_desc, keys, key_barriers, own_table, 0, loaded, column, start, stop, num_tiles, num_slots,
                WIDTH, True, BLOCK_SIZE, BLOCK_SIZE, TILE, STAGES,
            )  # fmt: skip
        number += 1
    _announce(items, item_barriers, number, (0, 0, 0, 0, 0), ITEMS)
    # Each program takes one item too many, and the last to do so leaves the counter as it was.
    if item == all_items + gl.num_programs(0) - 1:
        gl.store(counter, 0)


@gluon.jit
def _zero(rows, first, end, start, oldest, stop, stage_row, PIECES: gl.constexpr, TILE: gl.constexpr):
    """Zero the tokens outside of `oldest` … `stop` - 1 in groups first … end - 1 of the tile at `start`."""
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 8 // WARPS], [4, 8], [1, WARPS], [1, 0])
    for group in range(first, end):
        token_R = start + group * _PERIOD + gl.arange(0, _PERIOD, gl.SliceLayout(1, layout))
        seen_R = (token_R >= oldest) & (token_R < stop)
        for piece in gl.static_range(PIECES):
            part = rows.index(stage_row + piece * (TILE // _PERIOD) + group)
            part_RE = part.load(layout)
            part.store(gl.where(seen_R[:, None], part_RE, gl.zeros_like(part_RE)))


@gluon.jit
def _load_values(
    kv_desc, values, barriers, table, origin, loaded, mended, column, start, stop, oldest, num_tiles,
    num_slots,
    WIDTH: gl.constexpr, PAGED: gl.constexpr, BLOCK: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Load the values of one item as `_load_keys` does keys; returns `loaded` and `mended` after it.

    Where a block also has tokens that no query sees, they may be NaN, and 0 * NaN would be NaN: they are
    zeroed before the consumers are told of the tile.
    """
    values_ready, values_free = barriers
    PIECES: gl.constexpr = WIDTH // PIECE
    blocks = values._reinterpret(values.dtype, [STAGES * PIECES * (TILE // BLOCK), BLOCK, PIECE], SWIZZLED)
    rows = values._reinterpret(values.dtype, [STAGES * PIECES * (TILE // _PERIOD), _PERIOD, PIECE], SWIZZLED)
    at = start + (num_tiles - 1) * TILE
    slots = slots_of(table, origin, at, stop, num_slots, PAGED, BLOCK, BLOCK_SIZE, TILE)
    for _tile in range(num_tiles):
        stage = loaded % STAGES
        _wait_until_free(values_free.index(stage), loaded // STAGES)
        ends = (at + TILE > stop) & ((stop - at) % BLOCK != 0)
        begins = (at < oldest) if WINDOW > 0 else False
        # A tile to be zeroed arrives at the last barrier, which the consumers do not wait for.
        arrived = gl.where(ends | begins, STAGES, stage)
        _load_kv(kv_desc, blocks, stage, values_ready.index(arrived), slots, column, PIECES, BLOCK, TILE)
        if ends | begins:
            mbarrier.wait(values_ready.index(STAGES), mended % 2)
            mended += 1
            stage_row = stage * PIECES * (TILE // _PERIOD)
            if ends:
                block = (stop - at) // BLOCK + 1
                _zero(
                    rows, (stop - at) // _PERIOD, block * (BLOCK // _PERIOD), at, oldest, stop, stage_row,
                    PIECES, TILE,
                )  # fmt: skip
            if begins:
                _zero(rows, 0, (oldest - at) // _PERIOD + 1, at, oldest, stop, stage_row, PIECES, TILE)
            # WGMMA reads shared memory through the async proxy: plain stores need a fence.
            fence_async_shared()
            release(values_ready.index(stage))
        at -= TILE
        slots = slots_of(table, origin, at, stop, num_slots, PAGED, BLOCK, BLOCK_SIZE, TILE)
        loaded += 1
    return loaded, mended


@gluon.jit
def _copy_values(
    kv_desc, gathered_desc, values, items, item_barriers, barriers, float8, table, origins, table_stride,
    num_slots, num_gathered,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, ITEMS: gl.constexpr, WINDOW: gl.constexpr,
    SCALED: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """Copy the values of all items."""
    number, loaded, parts, mended = 0, 0, 0, 0
    head, row, _token, queries, position = _receive(items, item_barriers, 0, ITEMS)
    while queries > 0:
        oldest = _oldest(position, WINDOW)
        start, stop, num_tiles = _keys_of(queries, position, BLOCK_SIZE, TILE, WINDOW)
        own_table = table + row.to(gl.int64) * table_stride
        column = (KV_HEADS + head // (HEADS // KV_HEADS)) * WIDTH
        origin = gl.load(origins + row) if GATHERED else NOT_GATHERED
        if GATHERED and origin != NOT_GATHERED:
            loaded, mended = _load_values(
                gathered_desc, values, barriers, own_table, origin, loaded, mended, column, start, stop,
                oldest, num_tiles, num_gathered, WIDTH, False, TILE, BLOCK_SIZE, TILE, STAGES, WINDOW,
            )  # fmt: skip
        elif SCALED:
            loaded, parts = copy_float8(
                kv_desc, float8, values, barriers, own_table, loaded, parts, column, start, stop, oldest,
                num_tiles, num_slots, 2 * KV_HEADS, WIDTH, BLOCK_SIZE, TILE, STAGES,
            )  # fmt: skip
        else:
            loaded, mended = _load_values(
                kv_desc, values, barriers, own_table, 0, loaded, mended, column, start, stop, oldest,
                num_tiles, num_slots, WIDTH, True, BLOCK_SIZE, BLOCK_SIZE, TILE, STAGES, WINDOW,
            )  # fmt: skip
        number += 1
        head, row, _token, queries, position = _receive(items, item_barriers, number, ITEMS)


@gluon.jit
def _softmax_step(score_MN, top_M, total_M, scale):
    """One step of the online softmax: new maximum, new total, factor of earlier sums, weights."""
    new_top_M = gl.maximum(top_M, gl.max(score_MN, 1) * scale)
    weight_MN = gl.exp2(score_MN * scale - new_top_M[:, None])
    rescale_M = gl.exp2(top_M - new_top_M)
    return new_top_M, total_M * rescale_M + gl.sum(weight_MN, 1), rescale_M, weight_MN


@gluon.jit
def _hide(score_MN, token_N, seen_M, WINDOW: gl.constexpr):
    hidden_MN = token_N[None, :] > seen_M[:, None]
    if WINDOW > 0:
        hidden_MN = hidden_MN | (token_N[None, :] <= seen_M[:, None] - WINDOW)
    return gl.where(hidden_MN, float("-inf"), score_MN)


@gluon.jit
def _store(out_ME, out, token, head, queries, HEADS: gl.constexpr, TOGETHER: gl.constexpr):
    """Store `queries` tokens from `token` on, TOGETHER heads each from `head` on."""
    HALF: gl.constexpr = out_ME.shape[0]
    WIDTH: gl.constexpr = out_ME.shape[1]
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    m_M = gl.arange(0, HALF, gl.SliceLayout(1, stored))
    at_M = ((token + m_M // TOGETHER).to(gl.int64) * HEADS + head + m_M % TOGETHER) * WIDTH
    at_ME = at_M[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, stored))[None, :]
    out_ME = gl.convert_layout(out_ME.to(out.dtype.element_ty), stored)
    gl.store(out + at_ME, out_ME, mask=(m_M // TOGETHER < queries)[:, None])


@gluon.jit
def _consume(
    q, keys, values, items, item_barriers, q_barriers, key_barriers, value_barriers, out, sinks, scale,
    HALF_NUMBER: gl.constexpr, HEADS: gl.constexpr, TOGETHER: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
    ITEMS: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Attention of one half of each item's queries: query m is token m // TOGETHER, head m % TOGETHER."""
    q_ready, q_free = q_barriers
    keys_ready, keys_free = key_barriers
    values_ready, values_free = value_barriers
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores)
    sum_rows: gl.constexpr = gl.SliceLayout(1, sums)
    OWN: gl.constexpr = HALF // TOGETHER
    q_ME = q._reinterpret(q.dtype, [2, HALF, WIDTH], SWIZZLED).index(HALF_NUMBER)
    keys = keys._reinterpret(keys.dtype, [STAGES, TILE, WIDTH], SWIZZLED)
    values = values._reinterpret(values.dtype, [STAGES, TILE, WIDTH], SWIZZLED)
    none_MN = gl.zeros([HALF, TILE], gl.float32, scores)
    number, used = 0, 0
    head, _row, token, queries, position = _receive(items, item_barriers, 0, ITEMS)
    while queries > 0:
        start, _stop, num_tiles = _keys_of(queries, position, BLOCK_SIZE, TILE, WINDOW)
        first_seen = position + HALF_NUMBER * OWN
        seen_M = first_seen + gl.arange(0, HALF, score_rows) // TOGETHER
        token_N = start + (num_tiles - 1) * TILE + gl.arange(0, TILE, gl.SliceLayout(0, scores))
        at = start + (num_tiles - 1) * TILE
        sum_ME = gl.zeros([HALF, WIDTH], gl.float32, sums)
        top_M = gl.full([HALF], _LOWEST, gl.float32, score_rows)
        total_M = gl.zeros([HALF], gl.float32, score_rows)

        stage = used % STAGES
        mbarrier.wait(q_ready, number % 2)
        mbarrier.wait(keys_ready.index(stage), used // STAGES % 2)
        score_MN = warpgroup_mma(q_ME, keys.index(stage).permute((1, 0)), none_MN, use_acc=False)
        release(keys_free.index(stage))
        score_MN = _hide(score_MN, token_N, seen_M, WINDOW)
        top_M, total_M, rescale_M, weight_MN = _softmax_step(score_MN, top_M, total_M, scale)
        weight_MN = gl.convert_layout(weight_MN.to(q.dtype), factor)
        for _tile in range(1, num_tiles):
            before = used % STAGES
            before_phase = used // STAGES % 2
            used += 1
            at -= TILE
            token_N -= TILE
            stage = used % STAGES
            mbarrier.wait(keys_ready.index(stage), used // STAGES % 2)
            coming_MN = warpgroup_mma(
                q_ME, keys.index(stage).permute((1, 0)), none_MN, use_acc=False, is_async=True
            )
            mbarrier.wait(values_ready.index(before), before_phase)
            coming_ME = warpgroup_mma(weight_MN, values.index(before), sum_ME, is_async=True)
            score_MN = warpgroup_mma_wait(1, deps=[coming_MN])
            release(keys_free.index(stage))
            hides = at + TILE > first_seen + 1
            if WINDOW > 0:
                hides = hides | (at <= first_seen + OWN - 1 - WINDOW)
            if hides:
                score_MN = _hide(score_MN, token_N, seen_M, WINDOW)
            top_M, total_M, rescale_M, next_weight_MN = _softmax_step(score_MN, top_M, total_M, scale)
            sum_ME = warpgroup_mma_wait(0, deps=[coming_ME])
            release(values_free.index(before))
            sum_ME = sum_ME * gl.convert_layout(rescale_M, sum_rows)[:, None]
            weight_MN = gl.convert_layout(next_weight_MN.to(q.dtype), factor)
        release(q_free)
        stage = used % STAGES
        mbarrier.wait(values_ready.index(stage), used // STAGES % 2)
        sum_ME = warpgroup_mma(weight_MN, values.index(stage), sum_ME)
        release(values_free.index(stage))
        used += 1

        if SINKS:
            head_M = head + gl.arange(0, HALF, score_rows) % TOGETHER
            total_M += gl.exp2(gl.load(sinks + head_M).to(gl.float32) * _LOG2_E - top_M)
        out_ME = sum_ME / gl.convert_layout(total_M, sum_rows)[:, None]
        first = HALF_NUMBER * OWN
        _store(out_ME, out, token + first, head, queries - first, HEADS, TOGETHER)
        number += 1
        head, _row, token, queries, position = _receive(items, item_barriers, number, ITEMS)


@gluon.jit(
    do_not_specialize=["table_stride", "num_slots", "num_gathered"],
    do_not_specialize_on_alignment=["tiles", "count", "counter", "table", "sinks", "scales", "origins"],
)
def _attend(
    q_desc, kv_desc, gathered_desc, out, tiles, count, counter, table, sinks, scales, origins, scale,
    table_stride, num_slots, num_gathered,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, TOGETHER: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
    ITEMS: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, SCALED: gl.constexpr,
    GATHERED: gl.constexpr,
):  # fmt: skip
    """Grid (SMs,)."""
    PIECES: gl.constexpr = WIDTH // PIECE
    BLOCKS: gl.constexpr = TILE // BLOCK_SIZE
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [2 * PIECES, HALF // TOGETHER, TOGETHER, PIECE], _HEADS_SWIZZLED)
    keys = gl.allocate_shared_memory(dtype, [STAGES * PIECES * BLOCKS, BLOCK_SIZE, PIECE], SWIZZLED)
    values = gl.allocate_shared_memory(dtype, [STAGES * PIECES * BLOCKS, BLOCK_SIZE, PIECE], SWIZZLED)
    items = gl.allocate_shared_memory(gl.int32, [ITEMS * _FIELDS, 1], _PLAIN)
    # An item is free once the values' warp and both consumers have arrived, the rest once both consumers
    # have. The last barrier of the values is for those that are zeroed after they arrived.
    item_barriers = make_barriers(ITEMS, 1), make_barriers(ITEMS, 3)
    q_barriers = make_barriers(1, 1).index(0), make_barriers(1, 2).index(0)
    key_barriers = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    value_barriers = make_barriers(STAGES + 1, 1), make_barriers(STAGES, 2)
    key_float8, value_float8 = None, None
    if SCALED:
        key_float8 = make_float8(scales, STAGES, WIDTH, TILE)
        value_float8 = make_float8(scales, STAGES, WIDTH, TILE)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                q, keys, values, items, item_barriers, q_barriers, key_barriers, value_barriers, out, sinks,
                scale, 0, HEADS, TOGETHER, WIDTH, BLOCK_SIZE, TILE, HALF, STAGES, ITEMS, WINDOW, SINKS,
            )),
            (_consume, (
                q, keys, values, items, item_barriers, q_barriers, key_barriers, value_barriers, out, sinks,
                scale, 1, HEADS, TOGETHER, WIDTH, BLOCK_SIZE, TILE, HALF, STAGES, ITEMS, WINDOW, SINKS,
            )),
            (_copy_keys, (
                q_desc, kv_desc, gathered_desc, q, keys, items, item_barriers, q_barriers, key_barriers,
                key_float8, counter, tiles, count, table, origins, table_stride, num_slots, num_gathered,
                HEADS, KV_HEADS, TOGETHER, WIDTH, BLOCK_SIZE, TILE, STAGES, ITEMS, WINDOW, SCALED, GATHERED,
            )),
            (_copy_values, (
                kv_desc, gathered_desc, values, items, item_barriers, value_barriers, value_float8, table,
                origins, table_stride, num_slots, num_gathered, HEADS, KV_HEADS, WIDTH, BLOCK_SIZE, TILE,
                STAGES, ITEMS, WINDOW, SCALED, GATHERED,
            )),
        ],
        # Warps and registers per thread of all partitions but the first: consumers keep sums in registers,
        # and the warps that copy need few.
        [4, 2, 2] if SCALED else [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip


def attend(
    out_THE: Tensor,
    q_THE: Tensor,
    cache: KVLayer,
    gathered: Gathered | None,
    plan: AttentionPlan,
    listed: QueryTiles,
    rule: AttentionRule,
    num_sms: int,
) -> None:
    """Write the tokens of the listed tiles, of `tile_length` tokens, to `out_THE`, which is contiguous.

    `gathered`: some of the contexts, in the queries' dtype.
    """
    tokens, heads, width = q_THE.shape
    _, block_size, _, kv_heads, _ = cache.kv.shape
    together = _heads_together(heads, kv_heads)
    is_scaled = cache.scale is not None
    kv = cache.kv.view(torch.uint8) if is_scaled else cache.kv
    slots = len(kv) * block_size
    row = 2 * kv_heads * width
    q_box = [_HALF // together, together, PIECE.value]
    q_strides = [q_THE.stride(0), width, 1]
    kv_box = [min(block_size, CODE_ROWS.value) if is_scaled else block_size, PIECE.value]
    kv_desc = TensorDescriptor(kv, [slots, row], [row, 1], kv_box, (CODES if is_scaled else SWIZZLED).value)
    gathered_desc = kv_desc
    if gathered is not None:
        gathered_box = [_TILE, PIECE.value]
        gathered_desc = TensorDescriptor(
            gathered.kv, [len(gathered.kv), row], [row, 1], gathered_box, SWIZZLED.value
        )
    ignored = listed.count
    _attend[(num_sms,)](
        TensorDescriptor(q_THE, [tokens, heads, width], q_strides, q_box, _HEADS_SWIZZLED.value),
        kv_desc,
        gathered_desc,
        out_THE,
        listed.tiles_N4,
        listed.count,
        _counter(q_THE.device),
        plan.block_table_RW,
        ignored if rule.sinks_H is None else rule.sinks_H,
        ignored if cache.scale is None else cache.scale,
        ignored if gathered is None else gathered.origins_R,
        rule.scale * _LOG2_E.value,
        plan.block_table_RW.stride(0),
        slots,
        0 if gathered is None else len(gathered.kv),
        HEADS=heads,
        KV_HEADS=kv_heads,
        TOGETHER=together,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        TILE=_TILE,
        HALF=_HALF,
        STAGES=_STAGES,
        ITEMS=_ITEMS,
        WINDOW=rule.window,
        SINKS=rule.sinks_H is not None,
        SCALED=is_scaled,
        GATHERED=gathered is not None,
        num_warps=4,
    )


def _counter(device: torch.device) -> Tensor:
    """Items taken; 0 between launches."""
    return kept("hopper_attention", device, 1)
