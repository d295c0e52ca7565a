"""Bounds the work of one turn (a `schedule` call) that grows with the length of prompts.

Hashing, looking up and freeing the blocks of a long prompt can take more than a second. They are
done in slices, between which the decode batch runs.
"""

UNITS_PER_TURN = 16_384
"""A unit is about a microsecond: hashing one block takes one."""

LOOKUPS_PER_UNIT = 4
FREES_PER_UNIT = 4
IDS_PER_UNIT = 8
UNITS_PER_ADMISSION = 8


class TurnBudget:
    """Units left in this turn. An operation may overdraw them; the next one then waits for the next turn."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = UNITS_PER_TURN

    def refill(self) -> None:
        """Begin a turn."""
        self.left = UNITS_PER_TURN

    def spend(self, units: int) -> None:
        """Deduct `units`; the rest may become negative."""
        self.left -= units

    @property
    def is_spent(self) -> bool:
        """Whether sliced work must wait."""
        return self.left <= 0
