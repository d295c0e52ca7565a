"""Sampling parameters of every row of the persistent batch, and the sampler.

R rows sampled in a step, U of them with logits processors, Q of them with log probabilities,
V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.messages.worker import NewRow
from atom_ops import SamplingBatch, TokenLogprobs, apply_token_bitmask, sample, to_device, token_logprobs
from parallel.communicator import Communicator
from workers.batch.block_table import BatchLimits
from workers.batch.group_rows import Rows
from workers.batch.step_inputs import SamplingRows
from workers.grammar.library import GrammarLibrary
from workers.grammar.row_matchers import RowMatchers
from workers.memory.memory_guard import MemoryGuard, reason_of
from workers.sampling.logits_processor_state import LogitsProcessorRows, LogitsProcessorState
from workers.spec_decode.draft_rows import DraftRows

_PROCESSORS = "the logits processors"
_LOGPROBS = "the log probabilities"
_LOGITS_PER_SLICE = 1 << 24  # 64 MiB of float32


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The sampled tokens of a step."""

    ids_R: torch.Tensor
    """int64."""
    logprob_indices: list[int] = field(default_factory=list)
    """Indices, among the R tokens, of the Q with log probabilities."""
    logprobs: TokenLogprobs | None = None
    """Log probabilities of these Q tokens; None if Q is 0."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Why sampling failed for some of the R rows, by index; their ids are not valid."""
    late: Sequence[int] = ()
    """Indices of rows whose masks were not ready in time; their ids are not valid."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """Why the output of some rows cannot go on by what their requests say, by index: no valid ids."""


@dataclass(frozen=True, slots=True)
class _LogprobRows:
    """The rows whose requests want log probabilities."""

    indices: list[int]
    """Indices among the R rows."""
    indices_Q: torch.Tensor
    top: int
    """The largest number of top tokens that one of them requests."""


@dataclass(frozen=True, slots=True)
class _ProcessedRows:
    """The rows with logits processors: of one position each, because a position's penalties count the
    tokens before it."""

    processors: LogitsProcessorRows
    settings: SamplingBatch
    """Sampling settings of these U rows."""
    drafts_rows_U: torch.Tensor | None
    """int64: their indices among the R rows of `SamplingRows.drafts`; None without drafts."""
    grammar: "_GrammarRows | None"
    """Those with a grammar; None without."""


@dataclass(frozen=True, slots=True)
class _GrammarRows:
    """The rows whose output has a grammar."""

    rows: list[int]
    indices: list[int]
    """Indices among the R rows."""
    indices_G: torch.Tensor
    """int64: indices among the U rows."""
    other_ids_G: torch.Tensor
    """int64: an id of each row that does not end its output."""
    num_before: int
    """How many drafts come before what they sample."""


@dataclass(frozen=True, slots=True)
class _SamplingPlan:
    """The sampling inputs of a step's rows; valid until the rows change."""

    settings: SamplingBatch | None
    """Settings of all R rows, greedy for rows with logits processors; None if every row has some."""
    processed: list[_ProcessedRows]
    """With drafts, one after another: the sampled tokens after 0 drafts, after 1 draft …"""
    logprobs: _LogprobRows | None
    broken: list[int]
    """Indices of the rows that cannot be sampled: their logits processors did not fit into memory."""


class Sampler:
    """Samples the rows of each step, with the settings of each row of the persistent batch."""

    def __init__(
        self,
        limits: BatchLimits,
        vocab_size: int,
        device: torch.device,
        memory: MemoryGuard,
        grammars: GrammarLibrary | None = None,
        tp: Communicator | None = None,
    ):
        """Without `grammars`, no row may have one. `tp` are the ranks that sample the same ids; None: one."""
        max_rows = limits.max_rows
        self.vocab_size = vocab_size
        self._device = device
        self._temperature = np.zeros(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.ones(max_rows, np.float32)
        self._min_p = np.zeros(max_rows, np.float32)
        self._seed = np.zeros(max_rows, np.uint64)
        self._sequence = np.zeros(max_rows, np.int64)
        self._logprobs = np.full(max_rows, -1, np.int64)
        self._logits_processors = LogitsProcessorState(limits, vocab_size, device)
        self._matchers = RowMatchers(grammars, vocab_size, device, tp or Communicator())
        self._memory = memory
        self._broken: set[int] = set()
        self._planned_rows: Rows | None = None
        self._row_settings: tuple[Rows, SamplingBatch] | None = None

    def set_row(self, new: NewRow) -> None:
        """Set the sampling parameters of a row that is assigned to a new request."""
        row = new.row
        sampling = new.sampling
        self._planned_rows = None
        self._row_settings = None
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = sampling.seed
        self._sequence[row] = sampling.sequence
        self._logprobs[row] = sampling.logprobs
        self._broken.discard(row)
        self._matchers.set_row(new)
        if not self._memory.attempt(_PROCESSORS, lambda: self._logits_processors.set_row(new)):
            self._broken.add(row)

    def row_settings(self, rows: Rows) -> SamplingBatch:
        """Settings of `rows`, whatever logits processors they have; cached for the same array."""
        if self._row_settings is None or self._row_settings[0] is not rows:
            self._row_settings = rows, self._settings(rows, self._temperature[rows])
        return self._row_settings[1]

    def plain_settings(self, sampling: SamplingRows) -> SamplingBatch | None:
        """Settings of rows whose ids the op `sample` gives; other rows need `Sampler.sample`.

        None if a row has logits processors or log probabilities, or cannot be sampled. Returns the
        same object for the same array until a row is set.
        """
        plan = self._plan_of(sampling.rows, sampling.drafts)
        return None if plan.processed or plan.logprobs or plan.broken else plan.settings

    def sample(self, logits_RV: torch.Tensor, sampling: SamplingRows) -> SamplerOutput:
        """Sample one token for each row.

        Settings are gathered only if `sampling.rows` is another array than in the last step. Rows
        fail if the device has too little memory for their logits processors or log probabilities.
        """
        plan = self._plan_of(sampling.rows, sampling.drafts)
        failed = dict.fromkeys(plan.broken, reason_of(_PROCESSORS))
        late: list[int] = []
        refused: dict[int, str] = {}
        if not plan.processed:
            ids_R = self._sample_plain(logits_RV, plan, sampling)
        else:
            processed = plan.processed
            sampled = self._memory.attempt(
                _PROCESSORS, lambda: self._sample_processed(logits_RV, processed, sampling)
            )
            if sampled is None:
                for each in processed:
                    failed |= dict.fromkeys(each.processors.indices.tolist(), reason_of(_PROCESSORS))
            refused = self._grammar_failures(processed)
            late = [index for index in self._late(processed) if index not in refused and index not in failed]
            ids_R = self._joined(sampled, logits_RV, plan, sampling)
        wanted = plan.logprobs
        if wanted is None:
            return SamplerOutput(ids_R, failed=failed, late=late, refused=refused)
        logprobs = self._memory.attempt(_LOGPROBS, lambda: _logprobs(logits_RV, ids_R, wanted))
        if logprobs is None:
            failed |= dict.fromkeys(wanted.indices, reason_of(_LOGPROBS))
            return SamplerOutput(ids_R, failed=failed, late=late, refused=refused)
        return SamplerOutput(ids_R, wanted.indices, logprobs, failed, late, refused)

    def propose(self, drafts_NK: torch.Tensor) -> None:
        """Pass the drafts of all rows (int64), after what they have sampled, on to their grammars."""
        self._matchers.propose(drafts_NK)

    def _sample_plain(
        self, logits_RV: torch.Tensor, plan: _SamplingPlan, sampling: SamplingRows
    ) -> torch.Tensor:
        assert plan.settings is not None, "rows without logits processors have settings"
        return sample(logits_RV, plan.settings, sampling.positions_R)

    def _sample_processed(
        self, logits_RV: torch.Tensor, processed: Sequence[_ProcessedRows], sampling: SamplingRows
    ) -> list[torch.Tensor]:
        """Sampled ids of the rows with logits processors, int64 [U] for each of `processed`.

        A token is recorded if the drafts before it are what was sampled, so the record holds accepted
        tokens only, and each position that may be accepted sees the tokens before it.
        """
        drafts = sampling.drafts
        accepted_R = None if drafts is None else drafts.first_positions_R >= 0
        sampled = []
        for each in processed:
            processors = each.processors
            rows_U = processors.batch.rows_U
            positions_U = sampling.positions_R[rows_U]
            logits_UV = self._logits_processors.apply(
                processors, logits_RV, sampling.positions_R, sampling.positions
            )
            if (grammar := each.grammar) is not None:
                apply_token_bitmask(
                    logits_UV, grammar.indices_G, self._matchers.masks(grammar.rows, grammar.num_before)
                )
            ids_U = sample(logits_UV, each.settings, positions_U)
            if grammar is not None:
                ids_U = _without_ends(ids_U, logits_UV, grammar)
            sampled.append(ids_U)
            if accepted_R is None or drafts is None:
                if grammar is not None:
                    self._matchers.record(grammar.rows, ids_U.index_select(0, grammar.indices_G))
                self._logits_processors.record(processors, positions_U, ids_U)
                continue
            assert each.drafts_rows_U is not None
            accepted_U = accepted_R[each.drafts_rows_U]
            if grammar is not None:
                of_grammar = grammar.indices_G
                self._matchers.record(grammar.rows, ids_U[of_grammar], accepted_U[of_grammar])
            self._logits_processors.record(processors, positions_U, ids_U, accepted_U)
            accepted_R[each.drafts_rows_U] = accepted_U & (ids_U == drafts.next_drafts_S[rows_U])
        return sampled

    def _grammar_failures(self, processed: Sequence[_ProcessedRows]) -> dict[int, str]:
        """Why rows cannot go on with their grammar, by index among the R rows."""
        failed: dict[int, str] = {}
        for grammar in (each.grammar for each in processed if each.grammar is not None):
            reasons = self._matchers.failures(grammar.rows)
            indices = zip(grammar.rows, grammar.indices, strict=True)
            failed |= {index: reasons[row] for row, index in indices if row in reasons}
        return failed

    def _late(self, processed: Sequence[_ProcessedRows]) -> list[int]:
        """Rows whose grammar's masks were not ready in time, as indices among the R rows."""
        late = []
        for grammar in (each.grammar for each in processed if each.grammar is not None):
            rows = set(self._matchers.late(grammar.rows))
            late += [i for row, i in zip(grammar.rows, grammar.indices, strict=True) if row in rows]
        return late

    def _joined(
        self,
        sampled: list[torch.Tensor] | None,
        logits_RV: torch.Tensor,
        plan: _SamplingPlan,
        sampling: SamplingRows,
    ) -> torch.Tensor:
        """Sampled ids of all rows, int64 [R]: `sampled`, and of the rows without logits processors."""
        if plan.settings is None:
            if sampled is not None and len(sampled) == 1:
                return sampled[0]
            ids_R = torch.zeros_like(sampling.positions_R)
        else:
            ids_R = self._sample_plain(logits_RV, plan, sampling)
        for each, ids_U in zip(plan.processed, sampled or (), strict=False):
            ids_R.index_copy_(0, each.processors.batch.rows_U, ids_U)
        return ids_R

    def _plan_of(self, rows: Rows, drafts: DraftRows | None) -> _SamplingPlan:
        if rows is not self._planned_rows:
            self._plan = self._make_plan(rows, drafts)
            self._planned_rows = rows
        return self._plan

    def _make_plan(self, rows: Rows, drafts: DraftRows | None) -> _SamplingPlan:
        logprobs = self._logprob_rows(rows)
        broken_rows = self._broken
        which = self._logits_processors.indices(rows)
        processed = self._memory.attempt(_PROCESSORS, lambda: self._processed(rows, which, drafts))
        if processed is None:
            broken_rows = broken_rows | self._logits_processors.rows
            processed = []
        broken = (
            [index for index, row in enumerate(rows.tolist()) if row in broken_rows] if broken_rows else []
        )
        if processed and len(which) == len(rows):
            return _SamplingPlan(None, processed, logprobs, broken)
        temperature = self._temperature[rows]
        if processed:
            temperature[which] = 0
        return _SamplingPlan(self._settings(rows, temperature), processed, logprobs, broken)

    def _processed(self, rows: Rows, which: Rows, drafts: DraftRows | None) -> list[_ProcessedRows]:
        """The rows `rows[which]`, which have logits processors, by the drafts before them."""
        if drafts is None:
            return self._processed_rows(rows, which, None)
        before = drafts.num_before[which]
        by_draft = [which[before == number] for number in np.unique(before)]
        return [made for each in by_draft for made in self._processed_rows(rows, each, drafts)]

    def _grammar_rows(self, rows: Rows, which: Rows, drafts: DraftRows | None) -> _GrammarRows | None:
        """Those of `rows[which]` with a grammar; with drafts, all of `which` have as many before them."""
        num_before = 0 if drafts is None else int(drafts.num_before[which[0]])
        with_grammar = [u for u, row in enumerate(rows[which].tolist()) if row in self._matchers.rows]
        if not with_grammar:
            return None
        indices = np.array(with_grammar, np.int64)
        chosen = which[indices]
        grammar_rows = rows[chosen].tolist()
        columns = np.stack((indices, np.array(self._matchers.other_ids(grammar_rows), np.int64)))
        indices_G, other_ids_G = to_device(columns, self._device)
        return _GrammarRows(grammar_rows, chosen.tolist(), indices_G, other_ids_G, num_before)

    def _processed_rows(self, rows: Rows, which: Rows, drafts: DraftRows | None) -> list[_ProcessedRows]:
        """At most one."""
        processors = self._logits_processors.gather(rows, which)
        if processors is None:
            return []
        chosen = rows[which]
        settings = self._settings(chosen, self._temperature[chosen])
        drafts_rows = None if drafts is None else to_device(drafts.row_indices[which], self._device)
        return [_ProcessedRows(processors, settings, drafts_rows, self._grammar_rows(rows, which, drafts))]

    def _logprob_rows(self, rows: Rows) -> _LogprobRows | None:
        top = self._logprobs[rows]
        indices = np.flatnonzero(top >= 0)
        if not len(indices):
            return None
        return _LogprobRows(indices.tolist(), to_device(indices, self._device), int(top.max()))

    def _settings(self, rows: Rows, temperature: NDArray[np.float32]) -> SamplingBatch:
        return SamplingBatch.from_host(
            temperature,
            self._top_k[rows],
            self._top_p[rows],
            self._min_p[rows],
            self._seed[rows],
            self._sequence[rows],
            self._device,
        )


def _without_ends(ids_U: torch.Tensor, logits_UV: torch.Tensor, grammar: _GrammarRows) -> torch.Tensor:
    """Sampled ids that end no output whose ids are all excluded: its grammar refuses what it gets instead."""
    ids_G = ids_U[grammar.indices_G]
    is_excluded_G = logits_UV[grammar.indices_G, ids_G] == -torch.inf
    return ids_U.index_copy(0, grammar.indices_G, torch.where(is_excluded_G, grammar.other_ids_G, ids_G))


def logprob_slice(vocab_size: int) -> int:
    """Tokens whose logits are copied at a time to compute log probabilities."""
    return max(1, _LOGITS_PER_SLICE // vocab_size)


def _logprobs(logits_RV: torch.Tensor, ids_R: torch.Tensor, rows: _LogprobRows) -> TokenLogprobs:
    """Log probabilities of the Q sampled tokens; computed in slices, which bound the copied logits."""
    slices = rows.indices_Q.split(logprob_slice(logits_RV.shape[1]))
    return TokenLogprobs.joined(
        [token_logprobs(logits_RV.index_select(0, each), ids_R[each], rows.top) for each in slices]
    )
