"""The plans of `linear` with quantized weights that are worth measuring."""

from collections.abc import Iterator

from atom_ops.triton_impl.quantized_plans import (
    MANY,
    GemmPlan,
    GemvPlan,
    Key,
    LibraryPlan,
    QuantizedPlan,
)
from atom_ops.triton_impl.tuned import StreamKPlan

CLASSES = ((1, 1), (2, 16), (17, 32), (33, 64), (65, 256))
"""(fewest, most) tokens that share a plan when a model is loaded; more use general plans."""

_WHOLE_ROWS = 8192
_SHORT_ROWS = ((4, 4, 1), (2, 4, 2), (4, 4, 2), (4, 8, 2), (2, 2, 4), (4, 8, 4))
_LONG_ROWS = ((1, 8, 4), (1, 16, 4), (2, 16, 2), (1, 8, 2), (2, 8, 2))
"""(rows, warps, tiles) of the GEMV by whole rows."""
_COLUMNS = ((2, 4), (4, 2), (4, 4), (2, 8), (4, 8), (8, 4))
"""(rows, warps) of the GEMV by columns."""
_STREAM_K = (
    *((64, 8, 128), (64, 12, 128), (64, 8, 96), (64, 8, 64)),
    *((128, 6, 128), (128, 8, 128), (128, 6, 96), (128, 6, 64)),
)
"""(rows, stages, programs)."""
_FEW = ((64, 4, 3), (64, 4, 4), (64, 4, 6), (64, 4, 8), (128, 8, 4))
"""(rows, warps, stages) of the GEMM for up to 64 tokens."""
_MIDDLE = (
    *((64, 64, 4, 4), (64, 128, 4, 4), (128, 64, 4, 4)),
    *((128, 128, 8, 3), (128, 128, 4, 3), (256, 64, 8, 3)),
)
"""(tokens, rows, warps, stages) of the GEMM for up to 256 tokens."""
_MOST = ((128, 128, 8, 3), (128, 128, 8, 4), (128, 128, 4, 3))
"""The same for more."""
_PROGRAMS = 528
"""At most four to an SM of an H200."""


def candidates(key: Key, tokens: int) -> Iterator[QuantizedPlan]:
    """Plans for up to `tokens` tokens."""
    format, outputs, inputs = key
    if tokens == 1:
        yield from _vectors(format.startswith(("int4", "mxfp4")), inputs)
    if tokens <= 64:
        yield from _few(key, tokens)
    elif tokens <= 256:
        for tile, rows, warps, stages in _MIDDLE:
            for split in _splits(outputs // rows * -(-tokens // tile), inputs):
                yield GemmPlan(tokens, tile, rows, 128, warps, stages, split)
    else:
        for tile, rows, warps, stages in _MOST:
            yield GemmPlan(MANY, tile, rows, 128, warps, stages)
    if tokens >= 64 and format != "int8-channel":
        yield LibraryPlan(tokens if tokens <= 256 else MANY)


def _vectors(four_bits: bool, inputs: int) -> Iterator[GemvPlan]:
    """A thread loads 16 bytes of a row at once."""
    for rows, warps in _COLUMNS:
        columns = (32 if four_bits else 16) * 32 * warps
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
                yield StreamKPlan(1, tile, rows, 128, stages, programs)
    for rows, warps, stages in _FEW if tokens > 1 else _FEW[1:3]:
        for split in _splits(outputs // rows, inputs):
            yield GemmPlan(tokens, tile, rows, 128, warps, stages, split)


def _splits(tiles: int, inputs: int) -> list[int]:
    """1, and the others that give few enough programs and an even share of the inputs."""
    more = (split for split in (2, 3, 4) if tiles * split <= _PROGRAMS and inputs % (128 * split) == 0)
    return [1, *(split for split in more if inputs >= 512 * split)]
