"""Built-in plans of `linear`, measured once for each GPU model.

Shapes that are in no table here are tuned at start: see `tuning`.
"""

from dataclasses import dataclass

import msgspec


class LinearPlan(msgspec.Struct, frozen=True, tag="tiles"):
    """Kernel and tile of `linear` for one weight shape and few tokens."""

    tokens: int
    """Most tokens."""
    vector: bool
    """The GEMV kernel for one token; otherwise the GEMM kernel with tensor cores."""
    rows: int
    """Weight rows of a program."""
    columns: int
    """Weight columns of one iteration."""
    warps: int
    stages: int
    split_k: int = 1
    least: int = 1
    """Fewest tokens, if not those after the previous plan."""
    tiles: int = 0
    """Of the GEMV by whole rows: tiles of a program; 0: the GEMV by columns."""


class StreamKPlan(msgspec.Struct, frozen=True, tag="stream-k"):
    """A stream-K GEMM on Hopper: see `hopper_linear`."""

    least: int
    """Fewest tokens."""
    tokens: int
    """Most tokens."""
    rows: int
    """Weight rows of a tile."""
    columns: int
    """Weight columns of a step."""
    stages: int
    programs: int
    """At most the number of SMs, because programs wait for each other."""

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return min(self.tokens, 128)


Plan = LinearPlan | StreamKPlan
Plans = tuple[Plan, ...]
"""Of one weight shape, by rising tokens; torch is faster for numbers of tokens without a plan."""


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """A GEMV fused with the op before it: see `fused_linear`."""

    rows: int
    """Weight rows of a tile."""
    warps: int
    columns: int = 0
    """Weight columns of one iteration; 0: all."""
    tiles: int = 1
    """Tiles of a program, one after another."""


def _gemv(rows: int, columns: int, warps: int, stages: int) -> LinearPlan:
    return LinearPlan(1, True, rows, columns, warps, stages)


def _rows(rows: int, columns: int, warps: int, tiles: int) -> LinearPlan:
    """The GEMV by whole rows, of `columns` columns."""
    return LinearPlan(1, True, rows, columns, warps, 1, tiles=tiles)


def _gemm(tokens: int, rows: int, columns: int, warps: int, stages: int, split_k: int = 1) -> LinearPlan:
    return LinearPlan(tokens, False, rows, columns, warps, stages, split_k)


def stream_k(columns: int, stages: int, programs: int) -> StreamKPlan:
    """A plan for 33 to 64 tokens."""
    return StreamKPlan(33, 64, 64, columns, stages, programs)


# (output features, input features) of a weight -> plans by rising tokens, for 16-bit dtypes. One plan
# covers 2 to 16 tokens, so that among these a token's bits do not depend on the batch. cuBLAS is
# faster for other shapes and numbers of tokens, or they were not measured.
_LINEAR_H200: dict[tuple[int, int], Plans] = {
    # Qwen3-0.6B
    (4096, 1024): (
        _gemv(4, 1024, 4, 1),
        _gemm(16, 64, 128, 4, 6),
        _gemm(32, 64, 128, 4, 4),
        stream_k(128, 6, 64),
    ),
    (1024, 2048): (
        _gemv(4, 2048, 8, 1),
        _gemm(16, 16, 512, 2, 4),
        _gemm(32, 64, 128, 4, 6, 4),
        stream_k(128, 6, 64),
    ),
    (6144, 1024): (
        _gemv(8, 512, 4, 1),
        _gemm(16, 64, 128, 4, 6),
        _gemm(32, 64, 128, 4, 6),
        stream_k(128, 6, 96),
    ),
    (1024, 3072): (
        _gemv(4, 1024, 4, 1),
        _gemm(16, 16, 512, 2, 4),
        _gemm(32, 64, 128, 4, 4, 4),
        stream_k(128, 6, 64),
    ),
    (151936, 1024): (
        _gemv(8, 512, 4, 4),
        _gemm(16, 128, 128, 8, 3),
        _gemm(32, 64, 128, 4, 4),
        _gemm(64, 64, 64, 4, 6),
    ),
    # Qwen3-8B and Llama-3.1-8B
    (6144, 4096): (
        _gemv(4, 1024, 4, 1),
        _gemm(16, 64, 128, 4, 6),
        _gemm(32, 64, 128, 4, 6),
        stream_k(128, 6, 96),
    ),
    (4096, 4096): (
        _gemv(4, 512, 2, 1),
        _gemm(16, 16, 512, 2, 4),
        _gemm(32, 64, 128, 4, 4, 2),
        stream_k(128, 6, 64),
    ),
    (24576, 4096): (_gemv(4, 512, 2, 1), stream_k(128, 6, 128)),
    (28672, 4096): (_gemv(16, 256, 4, 1),),
    (4096, 12288): (
        _gemv(8, 256, 2, 5),
        _gemm(16, 16, 512, 2, 4),
        _gemm(32, 64, 128, 4, 6, 2),
        stream_k(128, 6, 128),
    ),
    (4096, 14336): (_gemv(8, 256, 2, 5), _gemm(16, 16, 512, 2, 4), stream_k(128, 6, 128)),
    (151936, 4096): (
        _gemv(4, 1024, 4, 4),
        _gemm(16, 64, 128, 4, 4),
        _gemm(32, 64, 128, 4, 4),
        _gemm(64, 128, 64, 4, 5),
    ),
    # Qwen3-8B with two tensor-parallel ranks
    (3072, 4096): (
        _rows(2, 4096, 8, 2),
        _gemm(16, 64, 128, 4, 3, 4),
        _gemm(32, 64, 128, 4, 6),
        stream_k(128, 6, 96),
    ),
    (4096, 2048): (_rows(4, 2048, 8, 2), stream_k(128, 6, 64)),
    (4096, 6144): (
        _rows(4, 6144, 8, 2),
        _gemm(16, 64, 128, 4, 6),
        _gemm(32, 64, 128, 4, 6),
        stream_k(128, 6, 64),
    ),
    (12288, 4096): (
        _rows(2, 4096, 8, 2),
        _gemm(16, 64, 128, 4, 4),
        _gemm(32, 64, 128, 4, 4),
        stream_k(128, 6, 128),
    ),
    (75968, 4096): (
        _rows(2, 4096, 8, 2),
        _gemm(16, 64, 128, 4, 3),
        _gemm(32, 64, 128, 4, 3),
        _gemm(64, 64, 64, 4, 4),
    ),
    # GPT-OSS-20B
    (5120, 2880): (_rows(2, 2880, 4, 2), _gemm(16, 64, 128, 4, 6), _gemm(32, 64, 128, 4, 6)),
    (2880, 4096): (_rows(2, 4096, 8, 2), _gemm(16, 64, 128, 4, 3, 4), _gemm(32, 64, 128, 4, 6)),
    (32, 2880): (
        _rows(4, 2880, 4, 1),
        _gemm(16, 16, 512, 2, 4),
        _gemm(64, 16, 64, 4, 4, 16),
        _gemm(128, 16, 64, 4, 4, 16),
        _gemm(256, 16, 64, 4, 4, 16),
    ),
    (201088, 2880): (
        _rows(2, 2880, 4, 2),
        _gemm(16, 64, 128, 4, 4),
        _gemm(32, 64, 64, 4, 4),
        _gemm(64, 128, 64, 4, 3),
    ),
    # Llama-3.1-8B's vocabulary
    (128256, 4096): (
        _gemv(8, 1024, 8, 3),
        _gemm(16, 128, 128, 8, 3),
        _gemm(32, 64, 128, 4, 4),
        _gemm(64, 128, 64, 4, 5),
    ),
}

LINEAR = {"NVIDIA H200": _LINEAR_H200}
"""By the driver's name of the GPU."""

# The same for the fused kernels: norm and GEMV, activation and GEMV.
NORM_LINEAR = {
    "NVIDIA H200": {
        (4096, 1024): FusedPlan(8, 4),
        (6144, 1024): FusedPlan(4, 4, tiles=2),
        (6144, 4096): FusedPlan(4, 8, tiles=2),
        (5120, 2048): FusedPlan(2, 8, tiles=4),
        (5120, 4096): FusedPlan(2, 4, tiles=2),
    }
}
SILU_LINEAR = {
    "NVIDIA H200": {
        (1024, 3072): FusedPlan(8, 8, 4096),
    }
}
