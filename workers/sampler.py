"""Sampling parameters of every row of the persistent batch, and the sampler.

R rows sampled in a step, U of them with logits processors, Q of them with log probabilities,
V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from atom.messages.worker import NewRow
from atom_ops import SamplingBatch, TokenLogprobs, sample, to_device, token_logprobs
from workers.block_table import BatchLimits
from workers.group_rows import Rows
from workers.input_batch import SamplingRows
from workers.logits_processor_state import LogitsProcessorRows, LogitsProcessorState
from workers.memory_guard import MemoryGuard, reason_of

_PROCESSORS, _LOGPROBS = "the logits processors", "the log probabilities"
_LOGITS_PER_SLICE = 1 << 24  # 64 MiB of float32


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The sampled tokens of a step."""

    ids_R: torch.Tensor
    """int64."""
    logprob_indices: list[int] = field(default_factory=list)
    """Which of the R tokens have log probabilities, Q in all."""
    logprobs: TokenLogprobs | None = None
    """Of these Q tokens; None if Q is 0."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Why sampling failed for some of the R rows, by index; their ids mean nothing."""


@dataclass(frozen=True, slots=True)
class _LogprobRows:
    """The rows whose requests want log probabilities."""

    indices: list[int]
    """Which of the R."""
    indices_Q: torch.Tensor
    top: int
    """The largest number of most likely tokens that one of them wants."""


@dataclass(frozen=True, slots=True)
class _ProcessedRows:
    """The rows with logits processors."""

    processors: LogitsProcessorRows
    settings: SamplingBatch
    """Of these U rows."""


@dataclass(frozen=True, slots=True)
class _SamplingPlan:
    """What sampling needs to know of a step's rows; valid until the rows change."""

    settings: SamplingBatch | None
    """Of all R rows, greedy for rows with logits processors; None if every row has some."""
    processed: _ProcessedRows | None
    logprobs: _LogprobRows | None
    broken: list[int]
    """Which of the R rows cannot be sampled: their logits processors did not fit into memory."""


class Sampler:
    """One column for each sampling setting, one entry for each row of the persistent batch."""

    def __init__(self, limits: BatchLimits, vocab_size: int, device: torch.device, memory: MemoryGuard):
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
        self._memory = memory
        self._broken: set[int] = set()
        self._planned_rows: Rows | None = None

    def set_row(self, new: NewRow) -> None:
        """Set the sampling parameters of a row that a new request takes."""
        row, sampling = new.row, new.sampling
        self._planned_rows = None
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = sampling.seed
        self._sequence[row] = sampling.sequence
        self._logprobs[row] = sampling.logprobs
        self._broken.discard(row)
        if not self._memory.attempt(_PROCESSORS, lambda: self._logits_processors.set_row(new)):
            self._broken.add(row)

    def plain_settings(self, rows: Rows) -> SamplingBatch | None:
        """Settings of rows that a captured graph can sample.

        None if a row has logits processors or log probabilities, or cannot be sampled. Returns the
        same object for the same array until a row is set.
        """
        plan = self._plan_of(rows)
        return None if plan.processed or plan.logprobs or plan.broken else plan.settings

    def sample(self, logits_RV: torch.Tensor, sampling: SamplingRows) -> SamplerOutput:
        """Sample one token for each row.

        Settings are gathered only if `sampling.rows` is another array than in the last step. Rows
        fail if the device has too little memory for their logits processors or log probabilities.
        """
        plan = self._plan_of(sampling.rows)
        failed = dict.fromkeys(plan.broken, reason_of(_PROCESSORS))
        if plan.processed is None:
            ids_R = self._sample_plain(logits_RV, plan, sampling)
        else:
            processed = plan.processed
            ids_U = self._memory.attempt(
                _PROCESSORS, lambda: self._sample_processed(logits_RV, processed, sampling)
            )
            if ids_U is None:
                failed |= dict.fromkeys(processed.processors.indices.tolist(), reason_of(_PROCESSORS))
            ids_R = self._joined(ids_U, logits_RV, plan, sampling)
        wanted = plan.logprobs
        if wanted is None:
            return SamplerOutput(ids_R, failed=failed)
        logprobs = self._memory.attempt(_LOGPROBS, lambda: _logprobs(logits_RV, ids_R, wanted))
        if logprobs is None:
            failed |= dict.fromkeys(wanted.indices, reason_of(_LOGPROBS))
            return SamplerOutput(ids_R, failed=failed)
        return SamplerOutput(ids_R, wanted.indices, logprobs, failed)

    def _sample_plain(
        self, logits_RV: torch.Tensor, plan: _SamplingPlan, sampling: SamplingRows
    ) -> torch.Tensor:
        assert plan.settings is not None, "rows without logits processors have settings"
        return sample(logits_RV, plan.settings, sampling.positions_R)

    def _sample_processed(
        self, logits_RV: torch.Tensor, processed: _ProcessedRows, sampling: SamplingRows
    ) -> torch.Tensor:
        """Sampled ids of the rows with logits processors, int64 [U]."""
        processors = processed.processors
        positions_U = sampling.positions_R[processors.batch.rows_U]
        logits_UV = self._logits_processors.apply(
            processors, logits_RV, sampling.positions_R, sampling.positions
        )
        ids_U = sample(logits_UV, processed.settings, positions_U)
        self._logits_processors.record(processors, positions_U, ids_U)
        return ids_U

    def _joined(
        self, ids_U: torch.Tensor | None, logits_RV: torch.Tensor, plan: _SamplingPlan, sampling: SamplingRows
    ) -> torch.Tensor:
        """Sampled ids of all rows, int64 [R]: `ids_U`, and of the rows without logits processors."""
        assert plan.processed is not None
        if plan.settings is None:
            return torch.zeros_like(sampling.rows_R) if ids_U is None else ids_U
        ids_R = self._sample_plain(logits_RV, plan, sampling)
        if ids_U is None:
            return ids_R
        return ids_R.index_copy_(0, plan.processed.processors.batch.rows_U, ids_U)

    def _plan_of(self, rows: Rows) -> _SamplingPlan:
        if rows is not self._planned_rows:
            self._planned_rows, self._plan = rows, self._make_plan(rows)
        return self._plan

    def _make_plan(self, rows: Rows) -> _SamplingPlan:
        logprobs, broken_rows = self._logprob_rows(rows), self._broken
        gathered = self._memory.attempt(_PROCESSORS, lambda: [self._logits_processors.gather(rows)])
        if gathered is None:
            broken_rows = broken_rows | self._logits_processors.rows
        processors = gathered[0] if gathered else None
        broken = (
            [index for index, row in enumerate(rows.tolist()) if row in broken_rows] if broken_rows else []
        )
        if processors is None:
            return _SamplingPlan(self._settings(rows, self._temperature[rows]), None, logprobs, broken)
        with_processors = rows[processors.indices]
        settings = self._settings(with_processors, self._temperature[with_processors])
        processed = _ProcessedRows(processors, settings)
        if len(with_processors) == len(rows):
            return _SamplingPlan(None, processed, logprobs, broken)
        temperature = self._temperature[rows]
        temperature[processors.indices] = 0
        return _SamplingPlan(self._settings(rows, temperature), processed, logprobs, broken)

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


def logprob_slice(vocab_size: int) -> int:
    """Tokens whose logits are copied at a time to compute log probabilities."""
    return max(1, _LOGITS_PER_SLICE // vocab_size)


def _logprobs(logits_RV: torch.Tensor, ids_R: torch.Tensor, rows: _LogprobRows) -> TokenLogprobs:
    """Of the Q sampled tokens; in slices, which bound the copied logits."""
    slices = rows.indices_Q.split(logprob_slice(logits_RV.shape[1]))
    return TokenLogprobs.joined(
        [token_logprobs(logits_RV.index_select(0, each), ids_R[each], rows.top) for each in slices]
    )
