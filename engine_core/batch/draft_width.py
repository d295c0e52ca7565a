"""Whether the next step verifies drafts, where a step computes all of them, padding included.

A captured graph has one width: with K drafts a step of R rows computes R * (1 + K) tokens, whether the drafts
are accepted or not. That pays while the rows gain more tokens than the step takes longer. Where it does not,
steps have no drafts for a while, each time longer.
"""

FREE_TOKENS = 400
"""A step of so many tokens takes about twice as long as one of a single token: until then reading the weights
takes longer than computing."""
_TRIAL_STEPS = 4
_SHORTEST_PAUSE = 64
_LONGEST_PAUSE = 1024
_KEPT = 0.8
"""Weight of the mean so far when a step is added to it."""


class DraftWidth:
    """Chooses the drafts of each row in the next step: all that are configured, or none."""

    def __init__(self, num_drafts: int, drafts_in_pauses: bool = True):
        """`drafts_in_pauses`: whether steps without drafts propose some.

        Otherwise the first step after a pause has none to accept.
        """
        self._num_drafts = num_drafts
        self._drafts_in_pauses = drafts_in_pauses
        self._has_none = False
        """Whether the next step to record had none to accept."""
        self._mean = 0.0
        """Accepted drafts of a row in a step."""
        self._trials = 0
        """Steps since the last pause whose results have come."""
        self._pause = 0
        self._next_pause = _SHORTEST_PAUSE

    def next(self, num_rows: int) -> int:
        """The drafts of each of `num_rows` rows in the next step."""
        if not num_rows:
            self._reset()
            return self._num_drafts
        if self._pause:
            self._pause -= 1
            if not self._pause:
                self._trials = 0
                self._has_none = not self._drafts_in_pauses
            return 0
        cost = self._num_drafts * num_rows / (FREE_TOKENS + num_rows)
        if self._trials < _TRIAL_STEPS or self._mean > cost:
            return self._num_drafts
        self._pause = self._next_pause - 1
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        return 0

    def record(self, num_rows: int, num_accepted: int) -> None:
        """A step with drafts of `num_rows` rows has accepted so many."""
        if num_rows <= 0:
            return
        if self._has_none:
            self._has_none = False
            return
        mean = num_accepted / num_rows
        self._mean = _KEPT * self._mean + (1 - _KEPT) * mean if self._trials else mean
        self._trials += 1
        if self._trials == 4 * _TRIAL_STEPS:
            self._next_pause = _SHORTEST_PAUSE  # they have paid for long

    def _reset(self) -> None:
        self._has_none = False
        self._mean = 0.0
        self._trials = 0
        self._pause = 0
        self._next_pause = _SHORTEST_PAUSE
