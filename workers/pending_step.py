"""A launched step and its results."""

from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from atom.messages.engine import LogprobTable, PromptLogprobs, SampledLogprobs
from atom.messages.worker import BatchResult
from atom_ops import TokenLogprobs
from workers.input_batch import PromptChunk
from workers.sampler import SamplerOutput


class DeviceEvent(Protocol):
    """A point in the work of a device, such as `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


RecordEvent = Callable[[], DeviceEvent | None]
"""Records an event behind all work launched so far; None on a device that completes work at launch."""


def event_recorder(device: torch.device) -> RecordEvent:
    """Records events on the current stream of `device`."""

    def record() -> DeviceEvent:
        event = torch.cuda.Event()
        event.record()
        return event

    return record if device.type == "cuda" else lambda: None


class PendingStep:
    """Copies a step's results to the host; waits for the device in `result` alone.

    Every step has an event, also one that samples nothing: the engine core bounds the steps in
    flight, and measures their time, by their results.
    """

    def __init__(
        self,
        step: int,
        record_event: RecordEvent,
        sampled: SamplerOutput | None = None,
        chunks: list[PromptChunk] | None = None,
        prompt_logprobs: TokenLogprobs | None = None,
    ):
        self.step = step
        self._ids = None if sampled is None else _to_host(sampled.ids_R)
        self._logprob_indices = [] if sampled is None else sampled.logprob_indices
        self._logprobs = None if sampled is None or sampled.logprobs is None else _Columns(sampled.logprobs)
        self._chunks = chunks or []
        self._prompt = None if prompt_logprobs is None else _Columns(prompt_logprobs)
        self._done = record_event()

    def ready(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._done is None or self._done.query()

    def result(self) -> BatchResult:
        """The step's result; waits until the device has it."""
        if self._done is not None:
            self._done.synchronize()
        token_ids = b"" if self._ids is None else _packed(self._ids, "<i4")
        logprobs = None
        if self._logprobs is not None:
            logprobs = SampledLogprobs(
                self._logprob_indices, self._logprobs.table(0, len(self._logprob_indices))
            )
        return BatchResult(self.step, token_ids, logprobs, self._prompt_logprobs())

    def token_ids(self) -> bytes:
        """The sampled ids alone, packed int32, in batch order; waits like `result`."""
        return self.result().token_ids

    def _prompt_logprobs(self) -> list[PromptLogprobs]:
        if self._prompt is None:
            return []
        ends = accumulate(chunk.count for chunk in self._chunks)
        return [
            PromptLogprobs(chunk.row, chunk.start, self._prompt.table(end - chunk.count, end))
            for chunk, end in zip(self._chunks, ends, strict=True)
        ]


class _Columns:
    """Log probabilities of tokens, being copied to the host."""

    def __init__(self, logprobs: TokenLogprobs):
        self._ids_NW = _to_host(logprobs.ids_NW)
        self._values_NW = _to_host(logprobs.values_NW)
        self._ranks_N = _to_host(logprobs.ranks_N)

    def table(self, start: int, end: int) -> LogprobTable:
        """The log probabilities of tokens `start` to `end`."""
        return LogprobTable(
            self._ids_NW.shape[1],
            _packed(self._ids_NW[start:end], "<i4"),
            _packed(self._values_NW[start:end], "<f4"),
            _packed(self._ranks_N[start:end], "<i4"),
        )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor as it is; of a GPU tensor, a pinned copy that is filled asynchronously."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _packed(host: torch.Tensor, dtype: str) -> bytes:
    numbers: NDArray[np.generic] = host.numpy()
    return numbers.astype(dtype, copy=False).tobytes()
