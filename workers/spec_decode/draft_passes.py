"""The passes of a model that drafts, where its experts are spread over engines in lockstep.

    rank 0   a step that samples 2 rows   ─┐            ┌─▶ follow, predict 2 rows, predict 2 rows, …
    rank 1   no step                      ─┤  exchange  ├─▶ follow, predict 1 row,  predict 1 row,  …  padding
    rank 2   a step of a prompt chunk     ─┘            └─▶ follow, predict 1 row,  predict 1 row,  …  padding

Every pass has collectives, which all ranks launch in the same order. `follow` computes the tokens of the
step, on which the ranks have agreed. So they also agree on the rows of each prediction, and on the number of
drafts: the most that a rank wants. How many drafts a row may have after a step is not known before it; what
it was allowed after its last step counts.
"""

from collections.abc import Sequence

from parallel.expert import ExpertDispatch


class DraftPasses:
    """`plan`, then `agree` before a step; `begin` before each prediction after it."""

    def __init__(self, dispatch: ExpertDispatch):
        self._dispatch = dispatch
        self.planned = (0, 0)
        """Rows that this rank's next step samples, and drafts that they may have; of no step both are 0."""
        self.num_drafts = 0
        """Drafts on which the ranks have agreed for the step."""
        self.num_rows = 1
        """Rows of this rank in each prediction, with padding."""
        self._rows: Sequence[int] = ()

    def plan(self, num_rows: int, num_drafts: int) -> None:
        """State what this rank's next step is."""
        self.planned = num_rows, num_drafts

    def agree(self, plans: Sequence[tuple[int, int]]) -> None:
        """The `planned` numbers of each data-parallel rank, the same on all ranks."""
        self.planned = (0, 0)
        self.num_drafts = max(num_drafts for _, num_drafts in plans)
        self._rows = [max(num_rows, 1) for num_rows, _ in plans]
        self.num_rows = self._rows[self._dispatch.dp_rank]

    def begin(self) -> None:
        """Begin a pass that predicts the next draft."""
        self._dispatch.plan(self._rows, eager=True)
