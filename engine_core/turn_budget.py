"""How much work one turn of the core may do where the work grows with the length of prompts.

Hashing, looking up and freeing the blocks of a long prompt take a second or more in all. They are
done in slices, and the decode batch goes on in between.
"""

UNITS_PER_TURN = 16_384
"""A unit is about a microsecond: hashing one block takes one."""

LOOKUPS_PER_UNIT = 4
FREES_PER_UNIT = 4
IDS_PER_UNIT = 8
UNITS_PER_ADMISSION = 8


class TurnBudget:
    """Units that are left. A single operation may overdraw them; then all others wait for the next turn."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = UNITS_PER_TURN

    def refill(self) -> None:
        """Begin a turn."""
        self.left = UNITS_PER_TURN

    def spend(self, units: int) -> None:
        """Take `units`, whether or not they are left."""
        self.left -= units

    @property
    def is_spent(self) -> bool:
        """Whether sliced work must wait."""
        return self.left <= 0
