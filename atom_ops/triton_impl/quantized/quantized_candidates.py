"""The plans of `linear` with quantized weights that are worth measuring."""

from collections.abc import Iterator

from atom_ops.triton_impl.quantized.quantized_plans import (
    MANY,
    FP8StreamKPlan,
    GemmPlan,
    GemvPlan,
    Key,
    LibraryPlan,
    MmaPlan,
    PersistentGemvPlan,
    QuantizedPlan,
    RingPlan,
    WgmmaPlan,
)

CLASSES = ((1, 1), (2, 16), (17, 32), (33, 64), (65, 256))
"""(fewest, most) tokens that share a plan when a model is loaded; more use general plans."""

_WHOLE_ROWS = 8192
_LONGEST = 16384
_SHORT_ROWS = ((4, 4, 1), (2, 4, 2), (4, 4, 2), (4, 8, 2), (2, 2, 4), (4, 8, 4))
_LONG_ROWS = ((1, 8, 4), (1, 16, 4), (2, 16, 2), (1, 8, 2), (2, 8, 2))
"""(rows, warps, tiles) of the GEMV by whole rows."""
_COLUMNS = ((2, 4), (4, 2), (4, 4), (2, 8), (4, 8), (8, 4))
"""(rows, warps) of the GEMV by columns."""
_PERSISTENT = ((8, 4096, 8, 132), (2, 4096, 8, 264))
"""(rows, columns, warps, programs) of the persistent GEMV."""
_STREAM_K = (
    *((64, 8, 128), (64, 12, 128), (64, 8, 96), (64, 8, 64)),
    *((128, 6, 128), (128, 8, 128), (128, 6, 96), (128, 6, 64)),
)
"""(rows, stages, programs)."""
_STREAM_K_MIDDLE = ((64, 8, 128), (64, 8, 96))
"""The same for 65 to 256 tokens."""
_FEW = ((64, 4, 3), (64, 4, 4), (64, 4, 6), (64, 4, 8), (128, 8, 4))
"""(rows, warps, stages) of the GEMM for up to 64 tokens."""
_MIDDLE = (
    *((64, 64, 4, 4), (64, 128, 4, 4), (128, 64, 4, 4)),
    *((128, 128, 8, 3), (128, 128, 4, 3), (256, 64, 8, 3)),
)
"""(tokens, rows, warps, stages) of the GEMM for up to 256 tokens."""
_MOST = ((128, 128, 8, 3), (128, 128, 8, 4), (128, 128, 4, 3))
"""The same for more."""
_FEW_WORDS = ((64, 128, 3), (64, 128, 4), (64, 256, 3))
"""(rows, columns, stages) of the GEMM of 4-bit weights for up to 64 tokens."""
_MMA = ((8, 1), (4, 1), (2, 1), (4, 2), (2, 2), (16, 1))
"""(warps, tiles) of `MmaPlan`."""
_RING = ((4, 8), (2, 16), (4, 16))
"""(stages, warps) of `RingPlan` for one token."""
_WGMMA = ((3, 1, 1), (3, 1, 2), (2, 1, 1), (2, 2, 1), (2, 2, 2))
"""(blocks, phases, chunks) of `WgmmaPlan` for up to 64 tokens."""
_WGMMA_MIDDLE = ((3, 1, 1), (2, 1, 1))
"""The same for more."""
_MANY_WORDS = ((64, 128, 4, 3), (64, 64, 4, 3), (128, 64, 4, 3))
"""(tokens, rows, warps, stages) of the same for more. With 8 warps Triton 3.6 gives wrong results."""
_SMS = 132
"""SMs of an H200."""
_PROGRAMS = 528
"""At most four to an SM of an H200."""


def candidates(key: Key, tokens: int) -> Iterator[QuantizedPlan]:
    """Plans for up to `tokens` tokens."""
    format, outputs, inputs = key
    if format.startswith(("int4", "mxfp4")):
        yield from _four_bit(outputs, inputs, tokens)
        return
    if tokens == 1:
        yield from _vectors(inputs, 16)
        if format == "fp8-block":
            persistent = (PersistentGemvPlan(*each) for each in _PERSISTENT)
            yield from (plan for plan in persistent if inputs % plan.columns == 0 and inputs <= _LONGEST)
    if tokens <= 64:
        yield from _few(key, tokens)
    elif tokens <= 256:
        if format.startswith("fp8"):
            for rows, stages, programs in _STREAM_K_MIDDLE:
                if outputs % rows == 0:
                    yield FP8StreamKPlan(65, tokens, rows, 128, stages, programs)
        for tile, rows, warps, stages in _MIDDLE:
            for split in _splits(outputs // rows * -(-tokens // tile), inputs):
                yield GemmPlan(tokens, tile, rows, 128, warps, stages, split)
    else:
        for tile, rows, warps, stages in _MOST:
            yield GemmPlan(MANY, tile, rows, 128, warps, stages)
    if tokens >= 64 and format != "int8-channel":
        yield LibraryPlan(tokens if tokens <= 256 else MANY)


def _vectors(inputs: int, numbers: int) -> Iterator[GemvPlan]:
    """A thread loads 16 bytes of a row at once, which are so many numbers."""
    for rows, warps in _COLUMNS:
        columns = numbers * 32 * warps
        if columns <= inputs:
            yield GemvPlan(rows, columns, warps)
    for rows, warps, tiles in _SHORT_ROWS if inputs <= _WHOLE_ROWS else _LONG_ROWS:
        yield GemvPlan(rows, 0, warps, tiles)


def _few(key: Key, tokens: int) -> Iterator[QuantizedPlan]:
    format, outputs, inputs = key
    tile = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    if format.startswith("fp8") and tokens > 1:
        for rows, stages, programs in _STREAM_K:
            if outputs % rows == 0:
                yield FP8StreamKPlan(1, tile, rows, 128, stages, programs)
    for rows, warps, stages in _FEW if tokens > 1 else _FEW[1:3]:
        for split in _splits(outputs // rows, inputs):
            yield GemmPlan(tokens, tile, rows, 128, warps, stages, split)


def _splits(
    tiles: int, inputs: int, columns: int = 128, most: int = 4, tried: tuple[int, ...] = (2, 3, 4, 8)
) -> list[int]:
    """1, and the others that give few enough programs and an even share of the inputs."""
    shares = (split for split in tried if split <= most and inputs % (columns * split) == 0)
    return [1, *(split for split in shares if tiles * split <= _PROGRAMS and inputs >= 512 * split)]


def _four_bit(outputs: int, inputs: int, tokens: int) -> Iterator[QuantizedPlan]:
    if tokens == 1:
        yield from _vectors(inputs, 32)
        yield from (MmaPlan(1, *each) for each in _MMA)
        if inputs % 4096 == 0 and inputs <= 16384 and outputs % 16 == 0:
            yield from (RingPlan(1, *each) for each in _RING)
        return
    limit = tokens if tokens <= 256 else MANY
    tile = max(tokens, 16)
    if tokens <= 256:
        for blocks, phases, chunks in _WGMMA if tokens <= 64 else _WGMMA_MIDDLE:
            side = min(tile, 128)
            tiles = -(-outputs // (64 * blocks)) * -(-tokens // side)
            most = max(1, min(_SMS // tiles, inputs // 512))
            for split in dict.fromkeys((most, max(1, most // 2))):
                yield WgmmaPlan(limit, side, blocks, split, phases, chunks)
    if tokens <= 64:
        for rows, columns, stages in _FEW_WORDS:
            for split in _splits(outputs // rows, inputs, columns, 8):
                yield GemmPlan(limit, tile, rows, columns, 4, stages, split)
        return
    for tile, rows, warps, stages in _MANY_WORDS:
        for split in _splits(outputs // rows * -(-min(tokens, 256) // tile), inputs):
            yield GemmPlan(limit, tile, rows, 128, warps, stages, split)
    yield LibraryPlan(limit)
