"""Plans of `linear` with 16-bit weights: kernel and tile for a weight's shape and a number of tokens.

One plan covers 2 to 16 tokens, so that among these a token's bits do not depend on the batch. torch is
faster for numbers of tokens without a plan.
"""

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
    """Tiles of a program of the GEMV by whole rows; 0: the GEMV by columns."""


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
"""Plans of one weight shape, by rising tokens; torch is faster for numbers of tokens without a plan."""


class FusedPlan(msgspec.Struct, frozen=True):
    """A GEMV fused with the op before it: see `fused_linear`."""

    rows: int
    """Weight rows of a tile."""
    warps: int
    columns: int = 0
    """Weight columns of one iteration; 0: all."""
    tiles: int = 1
    """Tiles of a program, one after another."""


def stream_k(columns: int, stages: int, programs: int) -> StreamKPlan:
    """A plan for 33 to 64 tokens."""
    return StreamKPlan(33, 64, 64, columns, stages, programs)
