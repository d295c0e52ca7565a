"""Drafts of the rows of the persistent batch: their state on the device, verification, new proposals.

How many drafts a step accepts is known on the device alone. On a CPU a step is complete when it is
launched, so the host reads the state and computes only the drafts that exist (`exact`). On a GPU
the host never waits: it counts every draft as accepted until the result comes, so its computed
tokens are upper bounds, and the device corrects ids, positions, slots and contexts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.messages.worker import NewRow
from atom_ops import NO_DRAFT, RowState, StatePlan, to_device, verify_drafts
from workers.batch.block_table import BatchLimits
from workers.batch.group_rows import Rows
from workers.layers.context import GroupContext
from workers.spec_decode import draft_costs
from workers.spec_decode.adaptive import AdaptiveDrafts
from workers.spec_decode.draft_costs import StepTimer
from workers.spec_decode.draft_passes import DraftPasses
from workers.spec_decode.draft_rows import Computed, DraftRows, Draws, Sampled, Verified
from workers.spec_decode.forced_acceptance import ForcedAcceptance
from workers.spec_decode.proposer import Proposer


class Speculation:
    """The drafts of all rows."""

    def __init__(
        self,
        proposer: Proposer,
        limits: BatchLimits,
        last_N: tuple[torch.Tensor, torch.Tensor],
        exact: bool,
        adaptive: bool = False,
        forced_length: float | None = None,
    ):
        """`last_N` are ids and positions of the tokens that the rows sampled last.

        `adaptive`: rows have fewer drafts where these fail; without `exact` it is the core that sees to it.
        `forced_length`: mean tokens of a step, see `ForcedAcceptance`; None: drafts are verified.
        """
        ids_N, positions_N = last_N
        self.exact = exact
        self.state = RowState(
            ids_N,
            positions_N,
            limits_N=torch.zeros_like(ids_N),
            drafts_NK=ids_N.new_full((len(ids_N), limits.num_drafts), NO_DRAFT),
        )
        self._accepted_N: torch.Tensor | None = None
        self._proposer = proposer
        self._max_model_len = limits.max_model_len
        self._limits = np.zeros(limits.max_rows, np.int64)
        self._admissions = np.zeros(limits.max_rows, np.int64)
        self._forced = None if forced_length is None else ForcedAcceptance(forced_length, ids_N.device)
        self.timer = StepTimer()
        """Used where the number of drafts adapts."""
        self._adaptive: AdaptiveDrafts | None = None
        if adaptive and exact:
            self._adaptive = AdaptiveDrafts(limits.max_rows, limits.num_drafts, proposer.cost)

    def add_rows(self, new_rows: Sequence[NewRow]) -> None:
        """Rows that are assigned to new requests."""
        if not new_rows:
            return
        rows = np.array([new.row for new in new_rows], np.int64)
        limits = np.array([min(new.max_length, self._max_model_len) for new in new_rows], np.int64)
        self._limits[rows] = limits
        self._admissions[rows] += 1
        if self._adaptive is not None:
            self._adaptive.add_rows(rows)
        rows_R, limits_R = to_device(np.stack((rows, limits)), self.state.limits_N.device)
        self.state.limits_N.index_copy_(0, rows_R, limits_R)
        self._proposer.add_rows(new_rows)

    def begin_step(self, decodes_R: NDArray[np.bool_]) -> None:
        """Begin a step of rows that decode or not; its time is taken where drafts adapt to it."""
        if self._adaptive is not None:
            self.timer.begin(bool(decodes_R.all()))

    def track_accepted(self) -> torch.Tensor:
        """Accepted drafts of each row's last step, int64 [N], from now on."""
        if self._accepted_N is None:
            self._accepted_N = torch.zeros_like(self.state.ids_N)
        return self._accepted_N

    @property
    def runs_model(self) -> bool:
        """Whether a model drafts: `Draws` then have settings."""
        return self._proposer.runs_model

    def add_tokens(self, ids_T: torch.Tensor, groups: Sequence[GroupContext | StatePlan]) -> None:
        """The tokens that a step computes."""
        self._proposer.add_tokens(ids_T, groups)

    def kept(self, group: int) -> Sequence[torch.Tensor]:
        """What drafts need of the blocks of a KV group besides the caches of layers; see `Proposer`."""
        return self._proposer.kept(group)

    def last_starts(self, rows: Rows) -> Rows:
        """The last position at which each row may still compute a token."""
        return self._limits[rows] - 1

    def admissions(self, rows: Rows) -> Rows:
        """How often each row was assigned to a request."""
        return self._admissions[rows]

    def exact_work(self, rows: Rows, num_drafts: int) -> tuple[Rows, Rows, NDArray[np.int32]]:
        """The exact work of decoding rows: first positions, numbers of tokens, and their ids, row by row.

        A row at its limit computes no token, from position 0.
        """
        positions = self.state.positions_N.numpy()[rows]
        drafts = self.state.drafts_NK.numpy()[rows]
        drafts = drafts[:, :num_drafts]
        at_limit = (positions < 0) | (positions >= self._limits[rows] - 1)
        # Drafts come from a text of which a window may have left a part: what comes after a missing draft
        # follows no known token.
        num_usable = np.logical_and.accumulate(drafts != NO_DRAFT, axis=1).sum(1)
        counts = np.where(at_limit, 0, 1 + num_usable)
        ids = np.concatenate((self.state.ids_N.numpy()[rows][:, None], drafts), 1)
        inside = np.arange(ids.shape[1]) < counts[:, None]
        return np.where(at_limit, 0, positions), counts, ids[inside].astype(np.int32)

    def any_drafts(self, rows: Rows) -> bool:
        """Whether one of these rows has a draft; with `exact` alone."""
        return bool((self.state.drafts_NK.numpy()[rows, :1] != NO_DRAFT).any())

    @property
    def passes(self) -> DraftPasses | None:
        """What the ranks of engines in lockstep agree on before a step; see `Proposer`."""
        return self._proposer.passes

    def plan_passes(self, rows: Rows, pauses: bool) -> None:
        """State the drafts of the rows that the next step samples; `pauses`: the core has none in it."""
        if self.passes is None:
            return
        num_drafts = 0 if pauses or not len(rows) else self.state.drafts_NK.shape[1]
        if self._adaptive is not None and num_drafts:
            num_drafts = int(self._adaptive.allowed(rows).max())
        self.passes.plan(len(rows), num_drafts)

    def observe(self, computed: Computed) -> None:
        """Follow a step that samples nothing."""
        if self._follows:
            self._proposer.observe(computed, None)
        if self.passes is not None:
            self._proposer.join_passes()

    def verify(self, drafts: DraftRows, draws: Draws) -> Verified:
        """Verify the drafts of sampled rows, which advance, and propose the next ones.

        Changes the state on the device; a graph may capture it.
        """
        kept, ids_S = drafts, draws.ids_S
        if self._forced is not None:
            kept, ids_S = self._forced.apply(drafts, ids_S)
        counts_R = verify_drafts(
            kept.by_row(ids_S), kept.drafts_RK, drafts.rows_R, drafts.first_positions_R, self.state
        )
        if self._accepted_N is not None:
            self._accepted_N.index_copy_(0, drafts.rows_R, counts_R - 1)
        if draws.settings is not None and self._follows:
            since = draft_costs.clock()
            sampled = Sampled(drafts, ids_S, draws.tokens_S, counts_R, draws.settings)
            self._proposer.observe(draws.computed, sampled)
            self.timer.followed(since)
        if self._proposer.records_outputs:
            # A row at its limit has sampled a token that is not its own.
            counts = counts_R.masked_fill(drafts.first_positions_R < 0, 0)
            self._proposer.record_outputs(drafts.rows_R, kept.by_row(ids_S), counts)
        proposed_R = (drafts.drafts_RK != NO_DRAFT).sum(1)
        if self._adaptive is not None:
            seconds = self.timer.step()
            allowed = self._adaptive.update(drafts.rows, counts_R.numpy(), proposed_R.numpy(), seconds)
            if self.passes is not None:
                allowed = np.minimum(allowed, self.passes.num_drafts)
            since = draft_costs.clock()
            self._propose_up_to(drafts, allowed)
            self.timer.drafted(since)
        elif self._is_pausing(drafts):
            self.state.drafts_NK.index_fill_(0, drafts.rows_R, NO_DRAFT)
        else:
            self._propose(drafts.rows_R)
        return Verified(counts_R, proposed_R, ids_S)

    @property
    def _follows(self) -> bool:
        """Whether what drafts is told of the tokens. With `passes` the other ranks need its part."""
        return self._adaptive is None or self.passes is not None or not self._adaptive.is_off

    def _is_pausing(self, drafts: DraftRows) -> bool:
        """Whether the core has steps without drafts, in which a model need not draft.

        A step without decoding rows has no drafts either, but the next one has.
        """
        if self.passes is not None:
            return self.passes.num_drafts == 0
        no_drafts = drafts.drafts_RK.shape[1] == 0 and bool(drafts.decoded.any())
        return no_drafts and self._proposer.runs_model and not self.exact

    def _propose(self, rows_R: torch.Tensor, allowed_R: torch.Tensor | None = None) -> None:
        longest = self._max_model_len
        if self.exact:
            longest = int(self.state.positions_N.index_select(0, rows_R).max()) + 1
        self._proposer.propose(rows_R, self.state, max(longest, 1), allowed_R)

    def _propose_up_to(self, drafts: DraftRows, allowed: Rows) -> None:
        """Propose at most `allowed` drafts for each row."""
        if allowed.any() or (self.passes is not None and self.passes.num_drafts):
            self._propose(drafts.rows_R, torch.from_numpy(allowed))
        drafts_NK = self.state.drafts_NK.numpy()
        ids = drafts_NK[drafts.rows]
        ids[np.arange(ids.shape[1]) >= allowed[:, None]] = NO_DRAFT
        drafts_NK[drafts.rows] = ids
