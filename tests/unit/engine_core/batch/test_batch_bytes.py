"""Bounds for all legal requests: the size of each frame, and the work of each turn of the core."""

import weakref
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from atom.shared.messages.codec import MAX_FRAME_BYTES, encode
from atom.shared.messages.engine import (
    MAX_SEQUENCES,
    AddRequest,
    LogitsProcessors,
    LogprobTable,
    PromptLogprobs,
    SampledLogprobs,
    Sampling,
    pack_ids,
)
from atom.shared.messages.worker import BatchResult, FullAttentionSpec, RowFailure, ScheduledBatch
from atom.shared.sampling_params import MAX_LOGPROBS
from engine_core.batch.batch_bytes import (
    MAX_NEW_ROWS_BYTES,
    MAX_PROMPT_LOGPROB_TOKENS,
    max_batch_bytes,
    max_result_bytes,
)
from engine_core.core import EngineCore
from engine_core.kv_cache.block_pool import CHECKED_AT_ONCE
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.requests.iteration_quota import UNITS_PER_ITERATION
from engine_core.scheduler import Limits
from tests.helpers.engine.core_driver import GREEDY

BLOCK = 16
LONG = 163_840
EOS = 2
replace = msgspec.structs.replace
WIDTH = 1 + MAX_LOGPROBS


def table(rows: int) -> LogprobTable:
    return LogprobTable(WIDTH, bytes(4 * WIDTH * rows), bytes(4 * WIDTH * rows), bytes(4 * rows))


class Engine:
    """A core whose steps all succeed; every row samples id 7, and accepts all drafts.

    Records the sizes of all frames.
    """

    def __init__(
        self,
        rows: int = 128,
        budget: int = 8192,
        blocks: int = 40_000,
        caching: bool = True,
        num_drafts: int = 0,
    ):
        self.limits = Limits(rows, budget, num_drafts=num_drafts)
        self.kv = KVCacheManager([FullAttentionSpec(BLOCK, 1)], [blocks], budget, 1, caching)
        self.core = EngineCore(self.limits, self.kv, max_model_len=1 << 20)
        self.batches: list[ScheduledBatch] = []
        self.largest_batch = self.largest_result = self.most_hashed = 0
        self._wants: dict[int, tuple[int, int]] = {}  # row: prompt length, or 0 without prompt logprobs
        self._known: dict[int, int] = {}
        self._computed: dict[int, int] = {}

    def add(self, request_ids: list[int], prompt: bytes, max_tokens: int = 2, **fields: Any) -> None:
        message = AddRequest(request_ids, prompt, max_tokens, **{"sampling": GREEDY, **fields})
        assert self.core.add(message, b"f") is None

    def step(self) -> bool:
        """Schedule and finish one step; whether there was one."""
        hashed = self.kv.num_hashed
        batch = self.core.schedule()
        self.most_hashed = max(self.most_hashed, self.kv.num_hashed - hashed)
        if batch is None:
            return False
        self.batches.append(batch)
        size = len(encode(batch))
        self.largest_batch = max(self.largest_batch, size)
        assert size <= max_batch_bytes(self.limits.max_num_seqs, self.limits.max_num_batched_tokens, BLOCK, 1)
        self._finish(batch)
        return True

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.core.num_live and not until():
            assert self.step() or self.core.has_deferred_work

    def _finish(self, batch: ScheduledBatch) -> None:
        for new in batch.new_rows:
            self._known[new.row], self._computed[new.row] = new.num_known, new.computed
            self._wants[new.row] = new.sampling.logprobs, new.prompt_length * (new.prompt_logprobs >= 0)
        sampling, indices, chunks = 0, [], []
        counts, width = [], 1 + batch.num_drafts
        for row, count in zip(batch.rows, batch.counts or [width] * len(batch.rows), strict=True):
            start = self._computed[row]
            sampled_here = width if start >= self._known[row] else 1
            self._computed[row] = end = start + count
            logprobs, prompt_length = self._wants[row]
            if (count := min(end, prompt_length - 1) - start) > 0:
                chunks.append(PromptLogprobs(row, start + 1, table(count)))
            if end >= self._known[row]:
                indices += list(range(sampling, sampling + sampled_here)) if logprobs >= 0 else []
                sampling += sampled_here
                counts.append(sampled_here)
        sampled = SampledLogprobs(indices, table(len(indices))) if indices else None
        result = BatchResult(batch.step, pack_ids([7] * sampling), sampled, chunks)
        if batch.num_drafts:
            proposed = pack_ids(count - 1 for count in counts)
            result = replace(result, counts=pack_ids(counts), num_proposed=proposed)
        limits = self.limits
        most = max_result_bytes(limits.max_num_seqs, limits.max_num_batched_tokens, limits.num_drafts)
        for message in [result, *self.core.update_from_output(result).values()]:
            self.largest_result = max(self.largest_result, len(encode(message)))
            assert self.largest_result <= most


def prompt_of(length: int, first: int = 0) -> bytes:
    return array("i", range(first, first + length)).tobytes()


PENALTY = Sampling(0.0, 0, 1.0, 0.0, 0, logits_processors=LogitsProcessors(repetition_penalty=1.5))


@pytest.mark.parametrize("fields", [{}, {"sampling": PENALTY}], ids=["plain", "repetition penalty"])
@pytest.mark.parametrize("caching", [True, False])
def test_many_sequences_of_a_long_prompt(caching: bool, fields: dict[str, Any]) -> None:
    """Their ids alone would be 80 MB: each step has only those that it computes."""
    engine = Engine(blocks=400_000, budget=LONG, caching=caching)
    engine.add(list(range(128)), prompt_of(LONG), **fields)
    if caching:
        engine.run()
        assert max(len(batch.new_rows) for batch in engine.batches) >= 3
    else:
        engine.run(until=lambda: len(engine.batches) == 4)
    assert engine.largest_batch < MAX_NEW_ROWS_BYTES + 2 * 4 * LONG
    penalized = "sampling" in fields
    assert all(len(new.prompt_ids) == 4 * LONG * penalized for b in engine.batches for new in b.new_rows)


def test_results_with_drafts_and_log_probabilities() -> None:
    engine = Engine(rows=64, budget=64 * 33, num_drafts=32)
    sampling = replace(PENALTY, logits_processors=None, logprobs=MAX_LOGPROBS)
    engine.add(list(range(64)), prompt_of(8), 200, sampling=sampling)
    engine.run()
    assert engine.largest_result > 64 * 33 * 172  # ids, values and ranks of all tokens
    kv = KVCacheManager([FullAttentionSpec(BLOCK, 1)], [64], 1 << 18, 1)
    with pytest.raises(ValueError, match="lower --max-num-seqs"):
        EngineCore(Limits(1 << 14, 1 << 20, num_drafts=32), kv, 1 << 20)


def test_rows_with_predictions() -> None:
    engine = Engine(num_drafts=3)
    prediction = prompt_of(1 << 19)
    engine.add(list(range(16)), prompt_of(8), 4, prediction_ids=prediction)
    engine.run()
    assert max(len(batch.new_rows) for batch in engine.batches) == 3
    assert engine.largest_batch < MAX_NEW_ROWS_BYTES + 100_000
    assert all(new.prediction_ids == prediction for batch in engine.batches for new in batch.new_rows)


def test_rows_of_resumed_sequences_have_their_output_ids() -> None:
    engine = Engine(rows=4, budget=64, blocks=64)
    engine.add([1, 2, 3, 4], prompt_of(40), 500, sampling=PENALTY)
    engine.run()
    assert engine.core.stats().preemptions > 0
    resumed = [new for batch in engine.batches for new in batch.new_rows if new.num_known > 40]
    assert resumed and all(len(new.output_ids) == 4 * (new.num_known - 40) for new in resumed)
    assert all(len(new.prompt_ids) == 4 * 40 for new in resumed)


@pytest.mark.parametrize(
    "processors",
    [
        LogitsProcessors(allowed_ids=prompt_of(50_000)),
        LogitsProcessors(bias_ids=prompt_of(1024), bias_values=[0.5] * 1024),
        LogitsProcessors(bad_words=[[150_000] * 256] * 64),
    ],
    ids=["allowed ids", "biases", "bad words"],
)
def test_a_thousand_requests_with_large_parameters_are_admitted_over_several_steps(
    processors: LogitsProcessors,
) -> None:
    sampling = replace(GREEDY, logits_processors=processors)
    engine = Engine(rows=1024, budget=8192)
    for number in range(1024):
        engine.add([number], prompt_of(3, number), sampling=sampling)
    each = len(encode(sampling))
    engine.run(until=lambda: len(engine.batches) == 6)
    assert 1 <= len(engine.batches[0].new_rows) <= MAX_NEW_ROWS_BYTES // each + 1
    assert engine.largest_batch < MAX_NEW_ROWS_BYTES + 128 * 1024


@pytest.mark.parametrize("budget", [8192, 1 << 19])
def test_prompt_log_probabilities_of_long_prompts(budget: int) -> None:
    """For half a million tokens in one step they would be 90 MB."""
    engine = Engine(rows=8, budget=budget, blocks=100_000)
    sampling = replace(GREEDY, logprobs=MAX_LOGPROBS)
    for number in range(4):
        engine.add([number], prompt_of(LONG, number), prompt_logprobs=MAX_LOGPROBS, sampling=sampling)
    engine.run()
    with_logprobs = [sum(batch.counts) - len(batch.rows) for batch in engine.batches if batch.counts]
    assert max(with_logprobs) <= min(budget, MAX_PROMPT_LOGPROB_TOKENS)
    assert engine.largest_result < 172 * (MAX_PROMPT_LOGPROB_TOKENS + 64)


def test_other_requests_run_with_prompts_that_have_log_probabilities() -> None:
    engine = Engine(rows=8, budget=4 * MAX_PROMPT_LOGPROB_TOKENS, blocks=100_000)
    engine.add([1], prompt_of(LONG), prompt_logprobs=0)
    engine.add([2], prompt_of(100, 5))
    engine.step()
    assert engine.batches[0].counts == [MAX_PROMPT_LOGPROB_TOKENS, 100]


def test_limits_whose_frames_would_be_too_large_are_refused() -> None:
    assert max_batch_bytes(1024, 1 << 20, 16, 4) < MAX_FRAME_BYTES
    assert max_result_bytes(1024, 1 << 20) < MAX_FRAME_BYTES
    for rows, budget in [(1 << 18, 1 << 18), (8, 1 << 24)]:
        kv = KVCacheManager([FullAttentionSpec(BLOCK, 1)], [64], budget, 1)
        with pytest.raises(ValueError, match="lower --max-num-seqs or --max-num-batched-tokens"):
            EngineCore(Limits(rows, budget), kv, 1 << 20)


def test_a_request_whose_row_fits_no_frame_is_refused() -> None:
    engine = Engine()
    sampling = replace(GREEDY, logits_processors=LogitsProcessors(allowed_ids=bytes(25 << 20)))
    refusal = engine.core.add(AddRequest([1, 2], prompt_of(3), 2, sampling), b"f")
    assert refusal is not None and [end.request_id for end in refusal.finished] == [1, 2]
    assert "bytes in a step, and the limit is" in refusal.finished[0].message


def test_long_reasons_of_failures_are_cut() -> None:
    engine = Engine()
    engine.add([1], prompt_of(3))
    batch = engine.core.schedule()
    assert batch is not None
    (deltas,) = engine.core.update_from_output(
        BatchResult(1, b"", failed=[RowFailure(0, "x" * 10_000)])
    ).values()
    assert len(deltas.finished[0].message) == 256


# Work of one turn


def test_the_sequences_of_a_prompt_hash_it_once() -> None:
    engine = Engine(blocks=30_000)
    engine.add(list(range(128)), prompt_of(LONG))
    engine.run()
    assert engine.kv.num_hashed <= LONG // BLOCK + 128


def test_a_prompt_of_a_million_tokens_is_hashed_in_slices() -> None:
    length = (1 << 20) - 8
    engine = Engine(blocks=70_000, budget=1 << 18)
    engine.add([1], prompt_of(length))
    engine.run()
    hashed = engine.kv.num_hashed
    engine.add([2], prompt_of(length))
    turns = 0
    while engine.core.stats().waiting:
        turns += 1
        assert engine.step() or engine.core.has_deferred_work
    assert turns >= 4 and engine.most_hashed <= UNITS_PER_ITERATION
    assert engine.core.stats().prefix_hits == engine.kv.num_hashed - hashed << 4 == length // BLOCK * BLOCK
    engine.run()


def test_other_requests_decode_while_a_prompt_is_hashed() -> None:
    engine = Engine(rows=8, blocks=70_000, budget=1 << 18)
    length = 1 << 19
    engine.add([1], prompt_of(length))
    engine.run()
    engine.add([2], prompt_of(5), max_tokens=100)
    engine.step()
    engine.add([3], prompt_of(length))
    engine.step()
    assert engine.batches[-1].rows == [0] and engine.core.stats().waiting == 1
    engine.run(until=lambda: not engine.core.stats().waiting)
    assert engine.core.stats().prefix_hits == length - BLOCK


def test_distinct_ids_of_long_prompts_are_collected_in_slices() -> None:
    engine = Engine(rows=8, blocks=70_000, budget=1 << 20)
    engine.add([1], prompt_of(1 << 19), sampling=PENALTY)
    assert engine.core.schedule() is None and engine.core.has_deferred_work
    engine.run()
    (new,) = (new for batch in engine.batches for new in batch.new_rows)
    assert len(new.prompt_ids) == 4 << 19


def test_aborting_many_sequences_frees_their_blocks_in_slices() -> None:
    length = LONG // 8
    engine = Engine(rows=MAX_SEQUENCES, blocks=40_000, budget=LONG)
    engine.add(list(range(MAX_SEQUENCES)), prompt_of(length), max_tokens=500)
    engine.run(until=lambda: engine.core.stats().running == MAX_SEQUENCES)
    owned = MAX_SEQUENCES * (length // BLOCK)
    engine.core.abort(list(range(MAX_SEQUENCES)))
    turns = 0
    while engine.core.has_deferred_work:
        left = sum(len(blocks) for _, blocks in engine.kv._to_free)
        assert engine.core.schedule() is None
        turns += 1
        assert left - sum(len(blocks) for _, blocks in engine.kv._to_free) <= 4 * UNITS_PER_ITERATION
    assert turns >= owned // (4 * UNITS_PER_ITERATION) - 1
    assert engine.core.stats().kv_blocks_used == 0 and engine.core.num_live == 0
    engine.core.check_integrity()


def test_blocks_to_be_freed_count_as_owned() -> None:
    engine = Engine(rows=4, blocks=40_000, budget=LONG)
    engine.add([1, 2, 3, 4], prompt_of(LONG), max_tokens=50)
    engine.run(until=lambda: engine.core.stats().running == 4)
    engine.kv.quota.spend(UNITS_PER_ITERATION)
    engine.core.abort([1, 2, 3, 4])
    assert engine.core.has_deferred_work and engine.core.stats().kv_blocks_used > LONG // BLOCK
    engine.core.check_integrity()


def test_integrity_is_checked_in_slices_of_an_unchanged_core() -> None:
    engine = Engine(blocks=70_000)
    engine.add([1], prompt_of(LONG))
    engine.run()
    slices = 1
    while not engine.core.check_integrity_slice():
        slices += 1
    assert slices > 20 and engine.core.check_integrity_slice()
    engine.add([2], prompt_of(5))
    assert not engine.core.check_integrity_slice(), "it begins anew"
    engine.kv.pools[0]._uncached.pop()
    with pytest.raises(AssertionError, match="listed as free"):
        while not engine.core.check_integrity_slice():
            pass


def test_a_long_block_table_is_checked_in_slices() -> None:
    engine = Engine(rows=1, blocks=70_000, budget=LONG)
    engine.add([1], prompt_of(LONG), max_tokens=50)
    engine.run(until=lambda: engine.core.stats().running == 1)
    pool, blocks = engine.kv.pools[0], engine.core._scheduler.requests[1].blocks
    slices_of_pool = sum(1 for _ in pool.check_integrity(pool._ref_counts))
    slices = sum(1 for _ in engine.kv.check_integrity([blocks]))
    assert slices - slices_of_pool > len(blocks.tables[0]) // CHECKED_AT_ONCE


def test_an_unfinished_integrity_check_keeps_no_ended_request() -> None:
    engine = Engine(blocks=70_000)
    engine.add([1], prompt_of(100), max_tokens=50)
    engine.run(until=lambda: engine.core.stats().running == 1)
    assert not engine.core.check_integrity_slice()
    settings = weakref.ref(engine.core._scheduler.requests[1].settings.stop_ids)
    engine.core.abort([1])
    engine.run()
    assert settings() is None


def test_many_stop_ids_are_not_united() -> None:
    engine = Engine(rows=64, budget=8192)
    for number in range(64):
        stops = list(range(1000 * number + 10, 1000 * number + 1010))
        engine.add([number], prompt_of(3, number), stop_token_ids=stops, max_tokens=3)
    batch = engine.core.schedule()
    assert batch is not None and engine.core._scheduler._states.in_flight[0].stop_ids is None
    ids = [1000 * row + 10 if row % 2 else 7 for row in range(64)]
    (deltas,) = engine.core.update_from_output(BatchResult(1, pack_ids(ids))).values()
    assert len(deltas.finished) == 32
