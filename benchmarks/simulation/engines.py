"""Engine cores with simulated workers: `EngineCore` as the engine runs it, and a step that only takes time.

A worker here keeps for each row how many tokens it has and how many of them are computed. That gives the work
of a step, and the rows that sample in it. The sampled id is always the same, and no request stops early.

Engines that share experts form one group, whose steps begin together and last as long as the longest of them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from atom.shared.messages.engine import AddRequest, CoreStats, Finished, FirstToken, Sampling, pack_ids
from atom.shared.messages.worker import BatchResult, FullAttentionSpec, ScheduledBatch
from benchmarks.simulation.roofline import Work
from engine_core.core import EngineCore
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.scheduler import Limits

__all__ = ["Cost", "Engine", "EngineSettings", "Group"]

_SAMPLED = pack_ids([7])
_GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
_FRONTEND = b"frontend"


class Cost(Protocol):
    """The time of a step."""

    def __call__(self, work: Work, all_tokens: float) -> float:
        """Seconds of a step; `all_tokens` are those of all engines of the group."""
        ...


@dataclass(frozen=True)
class EngineSettings:
    """The limits of each engine, as the flags of the same names."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    num_kv_blocks: int = 4096
    block_size: int = 16
    enable_prefix_caching: bool = True
    max_model_len: int = 1 << 20
    max_num_mixed_tokens: int = 0
    """0: as many as of other steps."""


@dataclass(slots=True)
class _Step:
    number: int
    sampling: int
    """Number of rows that sample."""
    work: Work


class Engine:
    """One engine core; `clock` returns the simulated time in seconds."""

    def __init__(self, settings: EngineSettings, clock: Callable[[], float]):
        """Raises ValueError for limits that the scheduler refuses."""
        limits = Limits(
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            max_num_mixed_tokens=settings.max_num_mixed_tokens,
        )
        specs = [FullAttentionSpec(settings.block_size, 1)]
        blocks = [settings.num_kv_blocks]
        kv = KVCacheManager(specs, blocks, limits.max_chunk, 1, settings.enable_prefix_caching)
        self._core = EngineCore(limits, kv, settings.max_model_len, clock)
        self._computed = np.zeros(settings.max_num_seqs, np.int64)
        self._known = np.zeros(settings.max_num_seqs, np.int64)
        self._scheduled: deque[_Step] = deque()
        self.computed_tokens = 0
        """Tokens of all steps so far."""

    def add(self, request_id: int, prompt: bytes, max_tokens: int) -> None:
        """Queue a request. Raises ValueError for one that the core refuses."""
        refusal = self._core.add(AddRequest([request_id], prompt, max_tokens, _GREEDY), _FRONTEND)
        if refusal is not None:
            raise ValueError(refusal.finished[0].message)

    def schedule(self) -> None:
        """Schedule steps until the core has enough of them in flight."""
        core = self._core
        while (batch := core.schedule()) is not None or core.has_deferred_work:
            if batch is not None:
                self._scheduled.append(self._step(batch))

    def next_step(self) -> Work | None:
        """The work of the step to run now; None when there is none."""
        return self._scheduled[0].work if self._scheduled else None

    def finish_step(self) -> tuple[Sequence[FirstToken], Sequence[Finished]]:
        """End that step; returns the first tokens and the ends of requests."""
        step = self._scheduled.popleft()
        self.computed_tokens += step.work.tokens
        deltas = self._core.update_from_output(BatchResult(step.number, _SAMPLED * step.sampling)).get(
            _FRONTEND
        )
        return ((), ()) if deltas is None else (deltas.first, deltas.finished)

    def stats(self) -> CoreStats:
        """The core's counters."""
        return self._core.stats()

    def check_integrity(self) -> None:
        """Raises AssertionError for an inconsistent core."""
        self._core.check_integrity()

    def _step(self, batch: ScheduledBatch) -> _Step:
        for new in batch.new_rows:
            self._computed[new.row] = new.computed
            self._known[new.row] = new.num_known
        rows = np.array(batch.rows)
        before = self._computed[rows]
        if not batch.counts:  # all rows decode
            after = before + 1
            self._computed[rows] = after
            return _Step(batch.step, len(rows), Work(rows=len(rows), context=int(after.sum())))
        counts = np.array(batch.counts)
        after = before + counts
        chunked = before < self._known[rows]
        decodes = ~chunked
        start = before[chunked]
        end = after[chunked]
        self._computed[rows] = after
        work = Work(
            rows=int(decodes.sum()),
            context=int(after[decodes].sum()),
            chunk_tokens=int(counts[chunked].sum()),
            chunk_pairs=int(((end * (end + 1) - start * (start + 1)) // 2).sum()),
            chunk_context=int(end.sum()),
        )
        return _Step(batch.step, work.rows + int((end >= self._known[rows][chunked]).sum()), work)


class Group:
    """Engines whose steps begin together; most groups have one."""

    def __init__(self, engines: Sequence[Engine], cost: Cost):
        self.engines = engines
        self.is_running = False
        self.busy_s = 0.0
        """Seconds that the group has spent in steps."""
        self._cost = cost
        self._stepping: list[Engine] = []

    def start(self) -> float | None:
        """Begin the next step; returns its seconds, or None when no engine has one."""
        works = [(engine, work) for engine in self.engines if (work := engine.next_step()) is not None]
        self.is_running = bool(works)
        if not works:
            return None
        all_tokens = sum(work.tokens for _, work in works)
        self._stepping = [engine for engine, _ in works]
        for engine in self._stepping:  # the step after this one is scheduled while it runs
            engine.schedule()
        seconds = max(self._cost(work, all_tokens) for _, work in works)
        self.busy_s += seconds
        return seconds

    def finish(self) -> tuple[list[FirstToken], list[Finished]]:
        """End the step, and schedule what follows."""
        first: list[FirstToken] = []
        finished: list[Finished] = []
        for engine in self._stepping:
            one_first, one_finished = engine.finish_step()
            first += one_first
            finished += one_finished
            engine.schedule()
        return first, finished
