"""Settings of kernels, measured once on each kind of GPU.

A machine with a GPU that is named here never tunes at start; on others see `tuning`.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How `linear` multiplies one shape of weight with few tokens."""

    tokens: int
    """At most so many."""
    least: int = field(default=1, kw_only=True)
    """At least so many, where the plan before leaves a gap to torch."""
    vector: bool
    """The kernel for one token; otherwise the one on the matrix units."""
    rows: int
    """Of the weight, for each program."""
    columns: int
    """Of the weight, at a time."""
    warps: int
    stages: int
    """Loads in flight, counted in tiles."""
    split_k: int = 1
    """That the columns are cut into, to keep more programs busy."""


@dataclass(frozen=True, slots=True)
class StreamKPlan:
    """How a product is dealt out evenly to the num_sms of a Hopper: see `hopper_linear`."""

    least: int
    """At least so many tokens."""
    tokens: int
    """At most so many, and so many in a tile."""
    rows: int
    """Of the weight, in a tile."""
    columns: int
    """Of the weight, at a step."""
    stages: int
    """Steps in flight."""
    programs: int
    """No more than the GPU has num_sms: they wait for each other."""


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """How a product for one token is made together with what lies in front of it."""

    rows: int
    """Of the weight, for each program at a time."""
    warps: int
    columns: int = 0
    """Of the weight, at a time; 0: all."""
    tiles: int = 1
    """Of `rows` rows, that a program makes one after another."""


def _gemv(rows: int, columns: int, warps: int, stages: int) -> LinearPlan:
    return LinearPlan(1, True, rows, columns, warps, stages)


def _gemm(tokens: int, rows: int, columns: int, warps: int, stages: int, split_k: int = 1) -> LinearPlan:
    return LinearPlan(tokens, False, rows, columns, warps, stages, split_k)


def _stream_k(columns: int, stages: int, programs: int) -> StreamKPlan:
    """For 33 to 64 tokens."""
    return StreamKPlan(33, 64, 64, columns, stages, programs)


# (output features, input features) of a weight -> plans by rising tokens, 16-bit floats. One plan
# serves 2 to 16 tokens, so that among these a token's bits do not depend on its company. A shape
# or a number of tokens that is not here is faster in cuBLAS, or has not been measured.
_LINEAR_H200: dict[tuple[int, int], tuple[LinearPlan | StreamKPlan, ...]] = {
    # Qwen3-0.6B
    (4096, 1024): (
        _gemv(4, 1024, 4, 1),
        _gemm(16, 64, 128, 4, 6),
        _gemm(32, 64, 128, 4, 4),
        _stream_k(128, 6, 64),
    ),
    (1024, 2048): (
        _gemv(4, 2048, 8, 1),
        _gemm(16, 16, 512, 2, 4),
        _gemm(32, 64, 128, 4, 6, 4),
        _stream_k(128, 6, 64),
    ),
    (6144, 1024): (
        _gemv(8, 512, 4, 1),
        _gemm(16, 64, 128, 4, 6),
        _gemm(32, 64, 128, 4, 6),
        _stream_k(128, 6, 96),
    ),
    (1024, 3072): (
        _gemv(4, 1024, 4, 1),
        _gemm(16, 16, 512, 2, 4),
        _gemm(32, 64, 128, 4, 4, 4),
        _stream_k(128, 6, 64),
    ),
    (151936, 1024): (
        _gemv(8, 512, 4, 4),
        _gemm(16, 128, 128, 8, 3),
        _gemm(32, 64, 128, 4, 4),
        _gemm(64, 64, 64, 4, 6),
    ),
    # Qwen3-8B and Llama-3.1-8B
    (6144, 4096): (_gemv(4, 1024, 4, 1), _gemm(16, 64, 128, 4, 6), _gemm(32, 64, 128, 4, 6)),
    (4096, 4096): (
        _gemv(4, 512, 2, 1),
        _gemm(16, 16, 512, 2, 4),
        _gemm(32, 64, 128, 4, 4, 2),
        _stream_k(128, 6, 64),
    ),
    (24576, 4096): (_gemv(4, 512, 2, 1), _stream_k(128, 6, 128)),
    (28672, 4096): (_gemv(16, 256, 4, 1),),
    (4096, 12288): (
        _gemv(8, 256, 2, 5),
        _gemm(16, 16, 512, 2, 4),
        _gemm(32, 64, 128, 4, 6, 2),
        _stream_k(128, 6, 128),
    ),
    (4096, 14336): (_gemv(8, 256, 2, 5), _gemm(16, 16, 512, 2, 4), _stream_k(128, 6, 128)),
    (151936, 4096): (
        _gemv(4, 1024, 4, 4),
        _gemm(16, 64, 128, 4, 4),
        _gemm(32, 64, 128, 4, 4),
        _gemm(64, 128, 64, 4, 5),
    ),
    (128256, 4096): (
        _gemv(8, 1024, 8, 3),
        _gemm(16, 128, 128, 8, 3),
        _gemm(32, 64, 128, 4, 4),
        _gemm(64, 128, 64, 4, 5),
    ),
}

LINEAR = {"NVIDIA H200": _LINEAR_H200}
"""By the name that the driver gives the GPU."""

# As above, for one token: norm and product, or activation and product, in one kernel.
NORM_LINEAR = {
    "NVIDIA H200": {
        (4096, 1024): FusedPlan(8, 4),
        (6144, 1024): FusedPlan(4, 4, tiles=2),
        (6144, 4096): FusedPlan(4, 8, tiles=2),
    }
}
SILU_LINEAR = {
    "NVIDIA H200": {
        (1024, 3072): FusedPlan(8, 8, 4096),
    }
}
