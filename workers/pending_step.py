"""A launched step and its results."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.messages.engine import LogprobTable, PromptLogprobs, SampledLogprobs
from atom.shared.messages.worker import BatchResult, RowFailure
from atom_ops import TokenLogprobs
from workers.batch.group_rows import Rows
from workers.batch.step_inputs import PromptChunk
from workers.sampling.sampler import SamplerOutput
from workers.spec_decode.draft_rows import DraftRows, Verified


class DeviceEvent(Protocol):
    """A point in the work of a device, such as `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


RecordEvent = Callable[[], DeviceEvent | None]
"""Records an event after all work launched so far; None on a device that completes work at launch."""


def event_recorder(device: torch.device) -> RecordEvent:
    """Records events on the current stream of `device`."""

    def record() -> DeviceEvent:
        event = torch.cuda.Event()
        event.record()
        return event

    return record if device.type == "cuda" else lambda: None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computed, on the device."""

    rows: Rows
    """The R sampled rows; with drafts, the row of each sampled token."""
    sampled: SamplerOutput | None = None
    """None if R is 0, or if sampling failed."""
    chunks: Sequence[PromptChunk] = ()
    prompt_logprobs: TokenLogprobs | None = None
    """Log probabilities of the tokens of all chunks; None if there are none."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Why the step failed for some rows, by row."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """Why the output of rows cannot go on by what their requests say, by row."""
    late: Sequence[int] = ()
    """Rows whose sampled ids are to be dropped, and whose requests are to be scheduled again."""
    advance: "Advance | None" = None
    """How far the rows advance; None: by their only sampled token."""


@dataclass(frozen=True, slots=True)
class Advance:
    """How far the R rows of a step with drafts advance. `rows` of its output has S entries."""

    drafts: DraftRows
    verified: Verified
    settle: Callable[[NDArray[np.int64]], None]
    """Called once with the rows' counts [R] when the host knows them."""


class PendingStep:
    """Copies a step's output to the host; waits for the device in `result` alone.

    Every step has an event, also one that samples nothing: the engine core bounds the steps in
    flight, and measures their time, by their results.
    """

    def __init__(self, step: int, output: StepOutput, record_event: RecordEvent):
        sampled = output.sampled
        self.step = step
        self._rows = output.rows
        self._ids = None if sampled is None else _to_host(sampled.ids_R)
        self._logprob_indices = [] if sampled is None else sampled.logprob_indices
        self._logprobs = None if sampled is None or sampled.logprobs is None else _Columns(sampled.logprobs)
        self._chunks = output.chunks
        self._prompt = None if output.prompt_logprobs is None else _Columns(output.prompt_logprobs)
        self._failed = output.failed
        self._refused = {row: why for row, why in output.refused.items() if row not in output.failed}
        self._late = list(output.late)
        self._dropped = {*output.failed, *output.refused, *output.late}
        self._advance = None if output.advance is None else _Advance(output.advance)
        self._done = record_event()

    def ready(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._done is None or self._done.query()

    def result(self) -> BatchResult:
        """The step's result; waits until the device has it. Call it once."""
        if self._done is not None:
            self._done.synchronize()
        failures = [RowFailure(row, reason) for row, reason in self._failed.items()]
        failures += [RowFailure(row, reason, True) for row, reason in self._refused.items()]
        prompt_logprobs = self._prompt_logprobs()
        if self._ids is None:
            return BatchResult(self.step, b"", None, prompt_logprobs, failures, late=self._late)
        kept = None
        counts = b""
        num_proposed = b""
        if self._dropped:
            kept = np.array([row not in self._dropped for row in self._rows.tolist()])
        if self._advance is not None:
            kept, *columns = self._advance.result(self._dropped)
            if self._advance.num_drafts:
                counts, num_proposed = (_packed(column, "<i4") for column in columns)
        ids = self._ids.numpy() if kept is None else self._ids.numpy()[kept]
        return BatchResult(
            self.step,
            _packed(ids, "<i4"),
            self._sampled_logprobs(kept),
            prompt_logprobs,
            failures,
            counts,
            num_proposed,
            self._late,
        )

    def _sampled_logprobs(self, kept: NDArray[np.bool_] | None) -> SampledLogprobs | None:
        """`kept` [R]: whether each sampled id is a token of the result; None: all are."""
        if self._logprobs is None:
            return None
        indices = np.array(self._logprob_indices)
        if kept is None:
            return SampledLogprobs(self._logprob_indices, self._logprobs.table(slice(0, len(indices))))
        has_result = kept[indices]
        indices = (kept.cumsum() - 1)[indices[has_result]]  # among the ids of the result
        if not len(indices):
            return None
        return SampledLogprobs(indices.tolist(), self._logprobs.table(has_result))

    def _prompt_logprobs(self) -> list[PromptLogprobs]:
        if self._prompt is None:
            return []
        ends = accumulate(chunk.count for chunk in self._chunks)
        return [
            PromptLogprobs(chunk.row, chunk.start, self._prompt.table(slice(end - chunk.count, end)))
            for chunk, end in zip(self._chunks, ends, strict=True)
            if chunk.row not in self._failed
        ]


class _Advance:
    """How far the rows advance, being copied to the host."""

    def __init__(self, advance: Advance):
        self._drafts = advance.drafts
        self.num_drafts = advance.drafts.drafts_RK.shape[1]
        self._settle = advance.settle
        self._counts = _to_host(advance.verified.counts_R)
        self._proposed = _to_host(advance.verified.proposed_R)

    def result(self, dropped: Set[int]) -> tuple[NDArray[np.bool_], Rows, Rows]:
        """Which of the S sampled ids are tokens; of rows that are not dropped, counts and proposed drafts."""
        counts = self._counts.numpy()
        drafts = self._drafts
        self._settle(counts)
        alive = np.array([row not in dropped for row in drafts.rows.tolist()], np.bool_)
        kept = (drafts.num_before < counts[drafts.row_indices]) & alive[drafts.row_indices]
        return kept, counts[alive], self._proposed.numpy()[alive]


class _Columns:
    """Log probabilities of tokens, being copied to the host."""

    def __init__(self, logprobs: TokenLogprobs):
        self._ids_NW = _to_host(logprobs.ids_NW)
        self._values_NW = _to_host(logprobs.values_NW)
        self._ranks_N = _to_host(logprobs.ranks_N)

    def table(self, tokens: slice | NDArray[np.bool_]) -> LogprobTable:
        """The log probabilities of some of the tokens."""
        return LogprobTable(
            self._ids_NW.shape[1],
            _packed(self._ids_NW.numpy()[tokens], "<i4"),
            _packed(self._values_NW.numpy()[tokens], "<f4"),
            _packed(self._ranks_N.numpy()[tokens], "<i4"),
        )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, which the next step does not overwrite; of a GPU tensor pinned, and filled asynchronously."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _packed(numbers: NDArray[np.generic], dtype: str) -> bytes:
    return numbers.astype(dtype, copy=False).tobytes()
