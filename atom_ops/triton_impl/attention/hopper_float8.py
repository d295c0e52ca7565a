"""Tiles of a float8 cache for prompt attention on Hopper, converted to the queries' dtype in shared memory.

    cache  ──TMA──▶  codes    [3 parts of a tile, pieces of a head, tokens of a part, 64] bytes
                     scales   [stages, tokens of a tile]
           ──────▶  tile     as if it had been loaded from a cache of the queries' dtype

While one part is converted the codes of the next two arrive, and the scales of the next tile. Written in
Gluon, which has no interpreter; `hopper_attention` says who waits for whom.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from atom_ops.triton_impl.hardware.hopper_pipeline import load_tile, make_barriers, release, thread_barrier

PIECE = gl.constexpr(64)
"""Features of a piece: 16-bit ones are as wide as the swizzle of shared memory."""
_ROWS = gl.constexpr(16)
"""Tokens that are converted together."""
CODE_ROWS = gl.constexpr(64)
"""Tokens of a part: shared memory has no room for the codes of two tiles."""
_PARTS = gl.constexpr(3)
"""Parts in shared memory."""
CODES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2))
_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def slots_of(
    table, origin, start, stop, num_slots,
    PAGED: gl.constexpr, STEP: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """The slot of each STEP-th token of the tile at `start`, STEP being a block or a part of one.

    From `stop` on it is the slot just past the cache, where TMA reads zeros. Without PAGED there is no block
    table: token 0 has slot `origin`.
    """
    slots = ()
    for i in gl.static_range(TILE // STEP):
        token = start + i * STEP
        exists = (token >= 0) & (token < stop)
        if PAGED:
            slot = gl.load(table + token // BLOCK_SIZE, mask=exists, other=0) * BLOCK_SIZE
            slot += token % BLOCK_SIZE if STEP < BLOCK_SIZE else 0
        else:
            slot = origin + token
        slots = slots + (gl.where(exists, slot, num_slots),)  # type: ignore[assignment]  # noqa: RUF005
    return slots


@gluon.jit
def make_float8(scales, STAGES: gl.constexpr, WIDTH: gl.constexpr, TILE: gl.constexpr):
    """What `copy_float8` needs, once for keys and once for values.

    Memory for codes, `scales` of the cache, memory for those of tiles, barriers of the codes.
    """
    codes = gl.allocate_shared_memory(gl.uint8, [_PARTS * (WIDTH // PIECE), CODE_ROWS, PIECE], CODES)
    scale_tiles = gl.allocate_shared_memory(gl.float32, [STAGES * (TILE // _ROWS), _ROWS], _SCALES)
    return codes, scales, scale_tiles, make_barriers(_PARTS, 1)


@gluon.jit
def _load_codes(
    kv_desc, codes, landed, part, slots, column,
    HALF: gl.constexpr, PIECES: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Load part number `part`, part HALF of its tile, of the head at `column` of a slot's numbers."""
    BLOCKS: gl.constexpr = CODE_ROWS // STEP
    barrier = landed.index(part % _PARTS)
    mbarrier.expect(barrier, PIECES * BLOCKS * kv_desc.block_type.nbytes)
    blocks = codes._reinterpret(gl.uint8, [_PARTS * PIECES * BLOCKS, STEP, PIECE], CODES)
    for piece in gl.static_range(PIECES):
        for i in gl.static_range(BLOCKS):
            to = blocks.index((part % _PARTS * PIECES + piece) * BLOCKS + i)
            load_tile(kv_desc, [slots[HALF * BLOCKS + i], column + piece * PIECE], barrier, to)


@gluon.jit
def _blocks_of(table, token_N, start, stop, BLOCK_SIZE: gl.constexpr):
    """The block of each token; 0 for those that are not in `start` … `stop` - 1."""
    exists_N = (token_N >= start) & (token_N < stop)
    return gl.load(table + token_N // BLOCK_SIZE, mask=exists_N, other=0)


@gluon.jit
def _scales_of(scales, block_N, token_N, SLOT: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    slot_N = block_N.to(gl.int64) * BLOCK_SIZE + (token_N & (BLOCK_SIZE - 1))
    return gl.load(scales + slot_N * SLOT)


@gluon.jit
def _convert(
    codes, scales, tiles, part, stage, at, oldest, stop,
    HALF: gl.constexpr, PIECES: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Convert part HALF of the tile at `at`; tokens outside of `oldest` … `stop` - 1, maybe NaN, become 0."""
    loaded: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [gl.num_warps(), 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, loaded)
    GROUPS: gl.constexpr = CODE_ROWS // _ROWS
    TILE_GROUPS: gl.constexpr = TILE // _ROWS
    is_whole = (at >= oldest) & (at + TILE <= stop)
    for number in range(GROUPS):
        group = HALF * GROUPS + number
        scale_R = scales.index(stage * TILE_GROUPS + group).load(of_rows)
        for piece in gl.static_range(PIECES):
            code_RE = codes.index((part % _PARTS * PIECES + piece) * GROUPS + number).load(loaded)
            x_RE = code_RE.to(gl.float8e4nv, bitcast=True).to(gl.float32) * scale_R[:, None]
            if not is_whole:
                token_R = at + group * _ROWS + gl.arange(0, _ROWS, of_rows)
                seen_R = (token_R >= oldest) & (token_R < stop)
                x_RE = gl.where(seen_R[:, None], x_RE, gl.zeros_like(x_RE))
            tiles.index((stage * PIECES + piece) * TILE_GROUPS + group).store(x_RE.to(tiles.dtype))


@gluon.jit
def copy_float8(
    kv_desc, float8, tiles, barriers, table, loaded, parts, column, start, stop, oldest, num_tiles, num_slots,
    SLOT: gl.constexpr, WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy one item's tiles of the head at `column`, the last one first; returns both counts after them.

    `loaded`: tiles copied before; `parts`: parts of tiles converted before, fewer if other tiles were not
    converted; `float8`: what `make_float8` returned; SLOT: scales of a slot.
    """
    codes, scales, scale_tiles, landed = float8
    ready, free = barriers
    PIECES: gl.constexpr = WIDTH // PIECE
    STEP: gl.constexpr = min(BLOCK_SIZE, CODE_ROWS)
    HALVES: gl.constexpr = TILE // CODE_ROWS
    GROUPS: gl.constexpr = TILE // _ROWS
    rows = tiles._reinterpret(tiles.dtype, [STAGES * PIECES * GROUPS, _ROWS, PIECE], SWIZZLED)
    code_rows = codes._reinterpret(gl.uint8, [_PARTS * PIECES * (CODE_ROWS // _ROWS), _ROWS, PIECE], CODES)
    scale_rows = scale_tiles._reinterpret(gl.float32, [STAGES, TILE], _SCALES)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = start + (num_tiles - 1) * TILE
    token_N = at + gl.arange(0, TILE, lanes)
    own_scales = scales + column // WIDTH
    slots = slots_of(table, 0, at, stop, num_slots, True, STEP, BLOCK_SIZE, TILE)
    thread_barrier()  # the codes of the item before have been read
    for half in gl.static_range(HALVES):
        _load_codes(kv_desc, codes, landed, parts + half, slots, column, half, PIECES, STEP)
    block_N = _blocks_of(table, token_N, start, stop, BLOCK_SIZE)
    scale_rows.index(loaded % STAGES).store(_scales_of(own_scales, block_N, token_N, SLOT, BLOCK_SIZE))
    # Where a tile is in the cache is loaded one tile before it, to hide the latency of the indirection.
    slots = slots_of(table, 0, at - TILE, stop, num_slots, True, STEP, BLOCK_SIZE, TILE)
    block_N = _blocks_of(table, token_N - TILE, start, stop, BLOCK_SIZE)
    for tile in range(num_tiles):
        stage = loaded % STAGES
        scale_N = _scales_of(own_scales, block_N, token_N, SLOT, BLOCK_SIZE)
        block_N = _blocks_of(table, token_N - 2 * TILE, start, stop, BLOCK_SIZE)
        mbarrier.wait(free.index(stage), (loaded // STAGES % 2) ^ 1)
        for half in gl.static_range(HALVES):
            thread_barrier()  # the codes of the part before have been read
            if tile + 1 < num_tiles:
                _load_codes(kv_desc, codes, landed, parts + HALVES, slots, column, half, PIECES, STEP)
            mbarrier.wait(landed.index(parts % _PARTS), parts // _PARTS % 2)
            _convert(code_rows, scale_tiles, rows, parts, stage, at, oldest, stop, half, PIECES, TILE)
            parts += 1
        slots = slots_of(table, 0, at - 2 * TILE, stop, num_slots, True, STEP, BLOCK_SIZE, TILE)
        loaded += 1
        scale_rows.index(loaded % STAGES).store(scale_N)
        # WGMMA reads shared memory through the async proxy: plain stores need a fence.
        fence_async_shared()
        release(ready.index(stage))
        at -= TILE
        token_N -= TILE
    return loaded, parts
