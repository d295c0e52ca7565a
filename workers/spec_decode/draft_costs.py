"""What drafts cost on a CPU, as measured: how much longer steps with drafts take than steps without.

    seconds of a step with k drafts of each row  =  plain * (1 + first + k * each)

`first` is what any drafts cost, as where steps without drafts are replayed from a recording and those with
some are not; `each` is one more token of all rows, and one more pass of what drafts. Both are fitted to the
last steps, for each power of two of rows. Until steps of both kinds were measured, `each` is estimated.

Time is CPU time of the worker's own thread, which other processes on the machine change least. Ranks that
compute the same rows use the time of the first one, so that they decide alike.
"""

import time
from dataclasses import dataclass

import torch

from parallel.communicator import Communicator

clock = time.thread_time
FREE_TOKENS = 8
"""Estimate: a step of so many tokens takes about twice as long as one of a single token."""
FIRST_PLAIN_STEPS = 3
"""Steps without drafts until their time is known; every ninth step has none until then."""
_FIRST_COMPARED = 8
_COMPARED = 128
"""Steps with drafts after which one has none, so that their times are compared."""
_KEPT = 0.9
"""Weight of the steps so far when one is added to them."""
_TOWARDS_EACH = 0.1
"""With nearly equal numbers of drafts, how much their whole cost counts as that of each."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one step, or 0 of what it did not do or what cannot be compared."""

    computing: float = 0.0
    """The forward pass and what comes with it, but for the two below."""
    following: float = 0.0
    """A model that drafts has computed the step's tokens."""
    drafting: float = 0.0
    """The step's drafts were proposed."""


class StepTimer:
    """Takes the time of the parts of each step."""

    tp = Communicator()
    """The ranks that compute the same rows."""

    def __init__(self) -> None:
        self._begun = 0.0
        self._compares = False
        self._following = 0.0
        self._drafting = 0.0

    def begin(self, compares: bool) -> None:
        """Begin to time a step; `compares`: it computes no prompt."""
        self._begun = clock()
        self._compares = compares
        self._following = 0.0

    def followed(self, since: float) -> None:
        """Note the time, since then, in which a model that drafts has followed the step."""
        self._following = clock() - since

    def drafted(self, since: float) -> None:
        """Note the time, since then, in which the drafts of the next step were proposed."""
        self._drafting = clock() - since

    def step(self) -> StepSeconds:
        """The seconds of the step that began last; called before drafts of the next one are proposed."""
        computing = clock() - self._begun - self._following
        drafting, self._drafting = self._drafting, 0.0
        if not self._compares:
            return StepSeconds()
        seconds = torch.tensor((computing, self._following, drafting), dtype=torch.float64)
        return StepSeconds(*self.tp.broadcast(seconds).tolist())


class _Steps:
    """Steps of similar numbers of rows: a line through (drafts of each row, relative excess of the time)."""

    def __init__(self, each: float, most: int, following: float):
        """Begin with estimates, as if two steps had cost `each` a draft, with 1 and with `most` drafts."""
        self.plain = 0.0
        """Seconds of a step without drafts."""
        self.num_plain = 0
        self.since_plain = 0
        """Steps with drafts since the last one without."""
        self.following = following
        """Time in which a model that drafts follows a step, relative to one without drafts."""
        self._weight = 2.0
        self._x = 1.0 + most
        self._y = each * self._x
        self._xx = 1.0 + most * most
        self._xy = each * self._xx

    def add_plain(self, seconds: float) -> None:
        if self.num_plain < FIRST_PLAIN_STEPS:  # the first ones may wait for what later ones have
            self.plain = min(self.plain, seconds) if self.num_plain else seconds
        else:
            self.plain = _KEPT * self.plain + (1 - _KEPT) * min(seconds, 2 * self.plain)
        self.num_plain += 1
        self.since_plain = 0

    def add_drafts(self, drafts: float, seconds: float) -> None:
        self.since_plain += 1
        if not self.is_known:
            return
        first, each = self.line()
        # One step that was interrupted must not decide.
        excess = min(seconds / self.plain - 1, 1 + 2 * (first + each * drafts))
        self._weight = _KEPT * self._weight + 1
        self._x = _KEPT * self._x + drafts
        self._y = _KEPT * self._y + excess
        self._xx = _KEPT * self._xx + drafts * drafts
        self._xy = _KEPT * self._xy + drafts * excess

    @property
    def is_known(self) -> bool:
        return self.num_plain >= FIRST_PLAIN_STEPS and self.plain > 0

    def line(self) -> tuple[float, float]:
        """What the first draft costs besides, and what each costs, at least 0."""
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        together = self._xy / self._weight - x * y
        each = max((together + _TOWARDS_EACH * y / x) / (spread + _TOWARDS_EACH), 0.0)
        first = y - each * x
        return (first, each) if first > 0 else (0.0, max(y / x, 0.0))


class DraftCosts:
    """What drafts cost in steps of any number of rows, in units of a step without drafts."""

    def __init__(self, num_drafts: int, draft_cost: float = 0.0):
        """`num_drafts`: most of a row. `draft_cost`: estimate of proposing one more for all rows."""
        self._num_drafts = num_drafts
        self._draft_cost = draft_cost
        self._steps: dict[int, _Steps] = {}

    def add(self, num_rows: int, num_drafts: int, seconds: StepSeconds) -> None:
        """Count a step of these rows that had so many drafts in all."""
        if seconds.computing <= 0:
            return
        steps = self._of(num_rows)
        if num_drafts:
            steps.add_drafts(num_drafts / num_rows, seconds.computing + seconds.drafting)
        else:
            steps.add_plain(seconds.computing)
        if steps.is_known:
            following = min(seconds.following / steps.plain, 1 + 2 * steps.following)
            steps.following = _KEPT * steps.following + (1 - _KEPT) * following

    def of_drafts(self, num_rows: int) -> tuple[float, float]:
        """(first, each): a row with k drafts costs first + k * each of its steps without."""
        steps = self._of(num_rows)
        return steps.line() if steps.is_known else (0.0, self._estimate(num_rows))

    def of_following(self, num_rows: int) -> float:
        """What a step costs for the model that drafts to follow it."""
        return self._of(num_rows).following

    def must_compare(self, num_rows: int) -> bool:
        """Whether the next step should have no drafts, to measure it."""
        steps = self._of(num_rows)
        return steps.since_plain >= (_COMPARED if steps.is_known else _FIRST_COMPARED)

    def _of(self, num_rows: int) -> _Steps:
        bits = num_rows.bit_length()
        if bits not in self._steps:
            self._steps[bits] = _Steps(self._estimate(num_rows), self._num_drafts, self._draft_cost)
        return self._steps[bits]

    def _estimate(self, num_rows: int) -> float:
        return num_rows / (FREE_TOKENS + num_rows) + self._draft_cost
