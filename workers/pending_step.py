"""A step given to the device, and its results once the device has them."""

from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from atom.messages.engine import LogprobTable, PromptLogprobs, SampledLogprobs
from atom.messages.worker import BatchResult
from atom_ops import TokenLogprobs
from workers.input_batch import PromptChunk
from workers.sampler import SamplerOutput


class PendingStep:
    """Copies of a step's results on their way to the host; nothing here waits until asked."""

    def __init__(
        self,
        step: int,
        drawn: SamplerOutput | None = None,
        pieces: list[PromptChunk] | None = None,
        prompt: TokenLogprobs | None = None,
    ):
        self.step = step
        self._ids = None if drawn is None else _to_host(drawn.ids_R)
        self._asking = [] if drawn is None else drawn.asking
        self._logprobs = None if drawn is None or drawn.logprobs is None else _Columns(drawn.logprobs)
        self._pieces = pieces or []
        self._prompt = None if prompt is None else _Columns(prompt)
        self._copied: torch.cuda.Event | None = None
        some = drawn.ids_R if drawn else prompt.ids_NW if prompt else None
        if some is not None and some.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def ready(self) -> bool:
        """Whether `result` returns at once."""
        return self._copied is None or self._copied.query()

    def result(self) -> BatchResult:
        """What the step made; waits for the device where it must."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids = b"" if self._ids is None else _packed(self._ids, "<i4")
        logprobs = None
        if self._logprobs is not None:
            logprobs = SampledLogprobs(self._asking, self._logprobs.table(0, len(self._asking)))
        return BatchResult(self.step, token_ids, logprobs, self._prompt_logprobs())

    def token_ids(self) -> bytes:
        """The drawn ids alone, packed int32, in batch order."""
        return self.result().token_ids

    def _prompt_logprobs(self) -> list[PromptLogprobs]:
        if self._prompt is None:
            return []
        ends = accumulate(piece.count for piece in self._pieces)
        return [
            PromptLogprobs(piece.row, piece.start, self._prompt.table(end - piece.count, end))
            for piece, end in zip(self._pieces, ends, strict=True)
        ]


class _Columns:
    """Log probabilities of tokens, on the host or on their way to it."""

    def __init__(self, logprobs: TokenLogprobs):
        self._ids_NW = _to_host(logprobs.ids_NW)
        self._values_NW = _to_host(logprobs.values_NW)
        self._ranks_N = _to_host(logprobs.ranks_N)

    def table(self, start: int, end: int) -> LogprobTable:
        """Of the tokens `start` to `end`."""
        return LogprobTable(
            self._ids_NW.shape[1],
            _packed(self._ids_NW[start:end], "<i4"),
            _packed(self._values_NW[start:end], "<f4"),
            _packed(self._ranks_N[start:end], "<i4"),
        )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a pinned copy that holds its numbers as soon as the device gets there."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _packed(host: torch.Tensor, dtype: str) -> bytes:
    numbers: NDArray[np.generic] = host.numpy()
    return numbers.astype(dtype, copy=False).tobytes()
