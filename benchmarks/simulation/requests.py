"""The requests of a simulation: when they arrive, how long they are, and what they share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["SimulatedRequest", "Workload", "requests"]

_AT_ONCE = 4096


class SimulatedRequest(NamedTuple):
    """One request."""

    at: float
    """Seconds since the start."""
    prompt: bytes
    """Packed int32 ids."""
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """Poisson arrivals; lengths are uniform between `range_ratio` of the given ones and these.

    Each prompt begins with one of `prefixes` common prefixes of `prefix_len` tokens, chosen with equal
    probability; the rest of it is random.
    """

    requests: int
    rate: float = float("inf")
    """Requests per second; infinite: all arrive at once."""
    input_len: int = 512
    output_len: int = 128
    range_ratio: float = 1.0
    prefixes: int = 0
    prefix_len: int = 0
    vocab: int = 1 << 17
    seed: int = 0


def requests(workload: Workload) -> Iterator[SimulatedRequest]:
    """In order of arrival. The same workload gives the same requests."""
    rng = np.random.default_rng(workload.seed)
    prefixes = [_ids(rng, workload.prefix_len, workload.vocab) for _ in range(workload.prefixes)]
    now = 0.0
    for begin in range(0, workload.requests, _AT_ONCE):
        count = min(_AT_ONCE, workload.requests - begin)
        arrivals = now + np.cumsum(rng.exponential(1 / workload.rate, count))
        inputs = _lengths(rng, workload.input_len, workload.range_ratio, count)
        outputs = _lengths(rng, workload.output_len, workload.range_ratio, count)
        chosen = rng.integers(0, max(workload.prefixes, 1), count)
        for index in range(count):
            prompt = _ids(rng, int(inputs[index]), workload.vocab)
            if prefixes:
                prompt = prefixes[chosen[index]] + prompt
            yield SimulatedRequest(float(arrivals[index]), prompt, int(outputs[index]))
        now = float(arrivals[-1])


def _lengths(
    rng: np.random.Generator, length: int, ratio: float, count: int
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return rng.integers(max(1, int(length * ratio)), length + 1, count)


def _ids(rng: np.random.Generator, count: int, vocab: int) -> bytes:
    return rng.integers(0, vocab, count, dtype=np.int32).tobytes()
