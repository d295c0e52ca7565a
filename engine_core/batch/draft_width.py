"""Whether the next step verifies drafts, where a step computes all of them, padding included.

A captured graph has one width: with K drafts a step of R rows computes R * (1 + K) tokens, whether the drafts
are accepted or not. That pays while the rows gain more tokens than the step takes longer, drafting included.
Where it does not, steps have no drafts for a while, each time longer.

How much longer a step takes is measured, for each power of two of rows: after the first trial of drafts a few
steps have none. Until then it is estimated.
"""

from dataclasses import dataclass

FREE_TOKENS = 400
"""Estimate: a step of so many tokens takes about twice as long as one of a single token, because until then
reading the weights takes longer than computing."""
_TRIAL_STEPS = 4
_COMPARED_STEPS = 4
_COMPARED_FOR = 2048
"""Steps with drafts after which their time is compared again."""
_SHORTEST_PAUSE = 64
_LONGEST_PAUSE = 1024
_KEPT = 0.8
"""Weight of the mean so far when a step is added to it."""


@dataclass(slots=True)
class _Mean:
    """An exponential mean."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.value = _KEPT * self.value + (1 - _KEPT) * value if self.count else value
        self.count += 1


@dataclass(slots=True)
class _Times:
    """Seconds of steps with similar numbers of rows."""

    plain: _Mean
    drafts: _Mean
    compared_at: int = 0
    """Steps with drafts when the last comparison began."""


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
        self._paused_bits = 0
        """The number of rows when the last pause began."""
        self._next_pause = _SHORTEST_PAUSE
        self._times: dict[int, _Times] = {}
        """By the bits of the number of rows."""
        self._last = (0, 0)
        """Rows, as bits, and drafts of the last step that was measured."""

    def next(self, num_rows: int) -> int:
        """The drafts of each of `num_rows` rows in the next step."""
        if not num_rows:
            self._reset()
            return self._num_drafts
        if self._pause and num_rows.bit_length() + 1 < self._paused_bits:
            self._pause = 1  # drafts may pay in a batch of a quarter of the rows
            self._next_pause = _SHORTEST_PAUSE
        if self._pause:
            self._pause -= 1
            if not self._pause:
                self._trials = 0
                self._has_none = not self._drafts_in_pauses
            return 0
        if self._trials < _TRIAL_STEPS:
            return self._num_drafts
        times = self._times_of(num_rows)
        if self._mean > self._cost(num_rows, times):
            if not self._must_compare(times):
                return self._num_drafts
            times.compared_at = times.drafts.count
            self._pause = _COMPARED_STEPS - 1
            return 0
        self._pause = self._next_pause - 1
        self._paused_bits = num_rows.bit_length()
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        return 0

    def measured(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """A step of `num_rows` decoding rows, launched before the previous one ended, took so long."""
        last, self._last = self._last, (num_rows.bit_length(), num_drafts)
        if last == self._last:  # the first one of a kind may wait for what it needs
            times = self._times_of(num_rows)
            (times.drafts if num_drafts else times.plain).add(seconds)

    def record(self, num_rows: int, num_accepted: int) -> None:
        """Count the drafts accepted in a step that had drafts of `num_rows` rows."""
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

    def _times_of(self, num_rows: int) -> _Times:
        return self._times.setdefault(num_rows.bit_length(), _Times(_Mean(), _Mean()))

    def _cost(self, num_rows: int, times: _Times) -> float:
        """How much longer a step with drafts takes, in steps without."""
        if times.plain.value > 0 and times.drafts.count:
            return times.drafts.value / times.plain.value - 1
        return self._num_drafts * num_rows / (FREE_TOKENS + num_rows)

    def _must_compare(self, times: _Times) -> bool:
        """Whether a few steps without drafts are due; not before some with drafts were measured."""
        if not times.drafts.count:
            return False
        return not times.plain.count or times.drafts.count - times.compared_at > _COMPARED_FOR

    def _reset(self) -> None:
        self._has_none = False
        self._mean = 0.0
        self._trials = 0
        self._pause = 0
        self._next_pause = _SHORTEST_PAUSE
