"""How many drafts each row may have, by what the model accepted of its last ones and by what they cost.

For a row whose drafts are accepted with rate a each, k drafts give 1 + a + a² + … + a^k tokens in the time of
1 + first + k * each steps without (see `draft_costs`): few more while a step reads weights longer than it
computes. The k with the most tokens a time is taken. A row for which that is 0 has no drafts for a while,
each time longer.

A model that drafts follows the text also while its drafts pause. So its account is kept: the steps that its
drafts have saved, less the time that they, their verification and this following took. Where it loses, it is
off for a while, each time longer, and computes nothing. It lacks the text of the requests that ran meanwhile,
and drafts for later ones alone.

For devices that compute only the drafts that exist: all of it is on the host.
"""

import numpy as np
from numpy.typing import NDArray

from workers.batch.group_rows import Rows
from workers.spec_decode.draft_costs import DraftCosts, StepSeconds

SHORTEST_PAUSE = 64
"""Tokens without drafts after the first failure; twice as many after each further one."""
LONGEST_PAUSE = 4096
MOST_LOSS = 8.0
"""Steps of a row that a model that drafts may lose before it is off."""
MOST_GAIN = 32.0
"""Steps that count as gained before: not more, so that it is off soon if it begins to lose."""
SHORTEST_OFF = 1024
"""Steps of a row for which it is off then; four times as many after each further loss."""
LONGEST_OFF = 1 << 18
_KEPT = 0.8
"""Weight of earlier drafts when a row's next ones are counted."""
_FIRST = (0.6, 1.0)
"""Accepted and verified drafts with which a row begins: it has several drafts until it has failed twice."""
_AGAIN = (0.25, 0.5)
"""The same after a pause: one success or failure decides."""
_NOT_MEASURED = StepSeconds()


class AdaptiveDrafts:
    """The rates of all rows."""

    def __init__(self, num_rows: int, num_drafts: int, draft_cost: float = 0.0):
        """`draft_cost` is that of proposing one more draft of all rows, in units of a step."""
        self._accepted = np.full(num_rows, _FIRST[0])
        self._verified = np.full(num_rows, _FIRST[1])
        self._pause = np.zeros(num_rows, np.int64)
        """Tokens that the row goes on without drafts."""
        self._next_pause = np.full(num_rows, SHORTEST_PAUSE)
        self._allowed = np.full(num_rows, num_drafts)
        self._places = np.arange(num_drafts + 1)
        self._runs_model = draft_cost > 0
        self._costs = DraftCosts(num_drafts, draft_cost)
        self._lacks_text = np.zeros(num_rows, np.bool_)
        self._gain = 0.0
        """Steps of a row that the model has gained."""
        self._steps_off = 0
        """Steps of a row for which it is still off; then until the next request, whose text it can follow."""
        self._next_off = SHORTEST_OFF
        self.is_off = False
        """Whether the model computes nothing."""

    def add_rows(self, rows: Rows) -> None:
        """Start afresh in rows that have new requests."""
        self.is_off = self.is_off and self._steps_off > 0
        self._accepted[rows], self._verified[rows] = _FIRST
        self._pause[rows] = 0
        self._next_pause[rows] = SHORTEST_PAUSE
        self._lacks_text[rows] = self.is_off
        self._allowed[rows] = 0 if self.is_off else self._places[-1]

    def allowed(self, rows: Rows) -> Rows:
        """How many drafts each row may have since its last step; of a new request all."""
        return self._allowed[rows]

    def update(self, rows: Rows, counts: Rows, proposed: Rows, seconds: StepSeconds = _NOT_MEASURED) -> Rows:
        """Count a step that sampled `counts` tokens of each of its rows, after `proposed` drafts.

        Returns how many drafts each of them may have in the next step.
        """
        accepted = counts - 1
        drafted = proposed > 0
        kept = np.where(drafted, _KEPT, 1.0)
        accepted_sum = kept * self._accepted[rows] + accepted
        verified_sum = kept * self._verified[rows] + accepted + (accepted < proposed)
        pause = self._pause[rows]
        is_over = (pause > 0) & (pause <= counts)
        pause = np.maximum(pause - counts, 0)
        accepted_sum[is_over], verified_sum[is_over] = _AGAIN

        self._costs.add(len(rows), int(proposed.sum()), seconds)
        first, each = self._costs.of_drafts(len(rows))
        best = self._best(accepted_sum / verified_sum, first, each)
        failed = drafted & (best == 0) & (pause == 0)
        next_pause = np.where(drafted & (accepted == proposed), SHORTEST_PAUSE, self._next_pause[rows])
        pause[failed] = next_pause[failed]
        next_pause[failed] = np.minimum(2 * next_pause[failed], LONGEST_PAUSE)
        self._accepted[rows] = accepted_sum
        self._verified[rows] = verified_sum
        self._pause[rows] = pause
        self._next_pause[rows] = next_pause
        if self._runs_model:
            # A row whose text the model lacks says nothing about it, but shortens its pause.
            judged = len(rows) if self.is_off else len(rows) - int(self._lacks_text[rows].sum())
            cost = first * drafted.sum() + each * proposed.sum()
            following = self._costs.of_following(len(rows)) * judged
            self._account(judged, float(accepted.sum() - cost - following))
        allowed = np.where((pause > 0) | self._lacks_text[rows], 0, np.maximum(best, 1))
        if self._costs.must_compare(len(rows)):
            allowed[:] = 0
        self._allowed[rows] = allowed
        return allowed

    def _account(self, steps: int, gain: float) -> None:
        """Count a step of so many rows, that has gained so many of a row's steps."""
        if self.is_off:
            self._steps_off -= steps
            return
        self._gain += gain
        if self._gain >= MOST_GAIN:
            self._gain = MOST_GAIN
            self._next_off = SHORTEST_OFF
        elif self._gain < -MOST_LOSS:
            self._gain = 0.0
            self.is_off = True
            self._lacks_text[:] = True
            self._steps_off = self._next_off
            self._next_off = min(4 * self._next_off, LONGEST_OFF)

    def _best(self, rates: NDArray[np.float64], first: float, each: float) -> Rows:
        """The number of drafts with the most tokens a time, for each rate."""
        tokens = (rates[:, None] ** self._places).cumsum(1)
        return np.argmax(tokens / (1 + first * (self._places > 0) + each * self._places), 1)
