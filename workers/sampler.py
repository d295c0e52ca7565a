"""How every row draws: its settings, kept between steps, and the draw itself.

R rows that draw in a step, U of them with logit rules, Q of them asked for log probabilities,
V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from atom.messages.worker import NewRow
from atom_ops import SamplingBatch, TokenLogprobs, sample, to_device, token_logprobs
from workers.block_table import BatchLimits
from workers.group_rows import Rows
from workers.input_batch import SamplingRows
from workers.logits_processor_state import LogitsProcessorRows, LogitsProcessorState


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What the rows of a step drew."""

    ids_R: torch.Tensor
    """int64."""
    asking: list[int]
    """The Q draws whose log probabilities are wanted."""
    logprobs: TokenLogprobs | None
    """Of the Q; None where there are none."""


@dataclass(frozen=True, slots=True)
class _Asking:
    """The draws whose log probabilities are wanted."""

    draws: list[int]
    draws_Q: torch.Tensor
    top: int


@dataclass(frozen=True, slots=True)
class _ProcessedRows:
    """The draws whose logits are changed first."""

    draw: LogitsProcessorRows
    settings: SamplingBatch


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything about a step's draws that depends on the rows alone."""

    settings: SamplingBatch | None
    """Of all rows, greedy for those with rules; None where all have rules."""
    ruled: _ProcessedRows | None
    asking: _Asking | None


class Sampler:
    """One column for each sampling setting, one entry for each row of the persistent batch."""

    def __init__(self, limits: BatchLimits, vocab_size: int, device: torch.device):
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
        self._logits_processors = LogitsProcessorState(vocab_size, limits.max_model_len, device)
        self._planned_rows: Rows | None = None

    def set_row(self, new: NewRow) -> None:
        """A new request draws in a row."""
        row, sampling = new.row, new.sampling
        self._planned_rows = None
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = sampling.seed
        self._sequence[row] = sampling.sequence
        self._logprobs[row] = sampling.logprobs
        self._logits_processors.set_row(new)

    def plain_settings(self, rows: Rows) -> SamplingBatch | None:
        """How these rows draw; None where one has logit rules or wants log probabilities.

        The same array again gives the same object, as long as no request joins.
        """
        plan = self._plan_of(rows)
        return plan.settings if plan.ruled is None and plan.asking is None else None

    def draw(self, logits_RV: torch.Tensor, draw: SamplingRows) -> SamplerOutput:
        """One id for each row.

        Passing the same `draw.rows` array again saves gathering their settings again.
        """
        plan = self._plan_of(draw.rows)
        if plan.ruled is None:
            ids_R = self._sample_plain(logits_RV, plan, draw)
        else:
            ids_R = self._sample_processed(logits_RV, plan, plan.ruled, draw)
        asking = plan.asking
        if asking is None:
            return SamplerOutput(ids_R, [], None)
        logits_QV = logits_RV.index_select(0, asking.draws_Q)
        logprobs = token_logprobs(logits_QV, ids_R[asking.draws_Q], asking.top)
        return SamplerOutput(ids_R, asking.draws, logprobs)

    def _sample_plain(self, logits_RV: torch.Tensor, plan: _Plan, draw: SamplingRows) -> torch.Tensor:
        assert plan.settings is not None, "rows without rules have settings"
        return sample(logits_RV, plan.settings, draw.positions_R)

    def _sample_processed(
        self, logits_RV: torch.Tensor, plan: _Plan, ruled: _ProcessedRows, draw: SamplingRows
    ) -> torch.Tensor:
        rows_U = ruled.draw.rules.rows_U
        positions_U = draw.positions_R[rows_U]
        logits_UV = self._logits_processors.apply(ruled.draw, logits_RV, draw.positions_R, draw.positions)
        ids_U = sample(logits_UV, ruled.settings, positions_U)
        self._logits_processors.keep(ruled.draw, positions_U, ids_U)
        if plan.settings is None:
            return ids_U
        return self._sample_plain(logits_RV, plan, draw).index_copy_(0, rows_U, ids_U)

    def _plan_of(self, rows: Rows) -> _Plan:
        if rows is not self._planned_rows:
            self._planned_rows, self._plan = rows, self._make_plan(rows)
        return self._plan

    def _make_plan(self, rows: Rows) -> _Plan:
        asking = self._asking(rows)
        draw = self._logits_processors.gather(rows)
        if draw is None:
            return _Plan(self._settings(rows, self._temperature[rows]), None, asking)
        which = rows[draw.rows]
        ruled = _ProcessedRows(draw, self._settings(which, self._temperature[which]))
        if len(which) == len(rows):
            return _Plan(None, ruled, asking)
        temperature = self._temperature[rows]
        temperature[draw.rows] = 0
        return _Plan(self._settings(rows, temperature), ruled, asking)

    def _asking(self, rows: Rows) -> _Asking | None:
        wanted = self._logprobs[rows]
        draws = np.flatnonzero(wanted >= 0)
        if not len(draws):
            return None
        return _Asking(draws.tolist(), to_device(draws, self._device), int(wanted.max()))

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
