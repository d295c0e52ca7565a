"""Settings of kernels, measured once on each kind of GPU: no machine tunes at start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How `linear` multiplies with one shape of weight, for few tokens."""

    tokens: int
    """At most so many."""
    vector: bool
    """The kernel for one token; otherwise the one on the matrix units."""
    rows: int
    """Of the weight, for each program; columns at a time; parts that the columns are cut into."""
    columns: int
    warps: int
    stages: int
    parts: int = 1


LINEAR: dict[str, dict[tuple[int, int], tuple[LinearPlan, ...]]] = {}
