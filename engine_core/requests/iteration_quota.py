"""Bounds the work of one iteration (a `schedule` call) that grows with the length of prompts.

Hashing, looking up and freeing the blocks of a long prompt can take more than a second, in which no
running request would get a token. So each iteration does a part of this work, and later ones the rest.
"""

UNITS_PER_ITERATION = 16_384
"""A unit is about a microsecond: hashing one block takes one."""

LOOKUPS_PER_UNIT = 4
FREES_PER_UNIT = 4
IDS_PER_UNIT = 8
UNITS_PER_ADMISSION = 8


class IterationQuota:
    """Units left in this iteration.

    An operation may spend more than is left; the next one then waits for the next iteration.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = UNITS_PER_ITERATION

    def refill(self) -> None:
        """Begin an iteration."""
        self.left = UNITS_PER_ITERATION

    def spend(self, units: int) -> None:
        """Deduct `units`; the rest may become negative."""
        self.left -= units

    @property
    def is_spent(self) -> bool:
        """Whether deferrable work must wait for the next iteration."""
        return self.left <= 0
