"""A line in the log each 1,000 draft tokens: how many of them the model accepted."""

from collections.abc import Callable

from atom.shared.utils.logger import get_logger
from engine_core.stats import Counters

DRAFTS_PER_LINE = 1000
SECONDS_PER_LINE = 10.0
"""At least so long between two lines: a busy engine verifies thousands of drafts a second."""


class DraftLog:
    """What was verified and accepted since the last line."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._tokens = 0
        self._drafts = 0
        self._accepted = 0
        self._next_at = 0.0

    def update(self, counters: Counters) -> None:
        """Write a line if it is due."""
        tokens = counters.num_draft_tokens - self._tokens
        if tokens < DRAFTS_PER_LINE or self._clock() < self._next_at:
            return
        total = sum(count * drafts for count, drafts in counters.num_accepted.items())
        accepted = total - self._accepted
        drafts = counters.num_drafts - self._drafts
        get_logger().info(
            "drafts: %d of %d tokens accepted (%.1f %%), %.2f tokens a step; in all %d of %d (%.1f %%)",
            accepted,
            tokens,
            100 * accepted / tokens,
            1 + accepted / drafts,
            total,
            counters.num_draft_tokens,
            100 * total / counters.num_draft_tokens,
        )
        self._tokens = counters.num_draft_tokens
        self._drafts = counters.num_drafts
        self._accepted = total
        self._next_at = self._clock() + SECONDS_PER_LINE
