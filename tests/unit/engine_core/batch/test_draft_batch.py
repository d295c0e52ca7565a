"""Rules of steps with drafts, one at a time; test_core_storm.py lets them all meet."""

from typing import Any

import pytest

from atom.shared.messages.engine import FinishReason, pack_ids, unpack_ids
from atom.shared.messages.worker import (
    BatchResult,
    FullAttentionSpec,
    ScheduledBatch,
    SlidingWindowSpec,
)
from engine_core.scheduler import Limits
from tests.helpers.engine.core_driver import VOCABULARY, CoreDriver
from tests.helpers.engine.simulated_worker import undisturbed

FULL = FullAttentionSpec(block_size=4, bytes_per_block=1)
WINDOW = SlidingWindowSpec(block_size=4, bytes_per_block=1, window=4)


def driver(
    accepted: list[int] | int, num_drafts: int = 3, blocks: int = 64, max_model_len: int = 64, **limits: Any
) -> CoreDriver:
    """A core whose worker accepts so many drafts of each row: always, or in the order of the list."""
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 40, **limits}

    def draft(most: int) -> tuple[int, int]:
        return most, accepted if isinstance(accepted, int) else accepted.pop(0)

    return CoreDriver([FULL], [blocks], Limits(**settings, num_drafts=num_drafts), max_model_len, draft=draft)


def step(run: CoreDriver) -> ScheduledBatch:
    """Schedule and execute one step, keeping the batch."""
    batch = run.core.schedule()
    assert batch is not None
    run.results.append(run.worker.execute(batch))
    run.core.check_integrity()
    return batch


def test_a_decoding_row_computes_its_drafts_and_advances_by_the_accepted_ones() -> None:
    run = driver([2, 0, 3])
    run.add(1, range(6), max_tokens=20)
    first = step(run)
    assert (first.counts, first.num_drafts) == ([6], 0)
    assert first.new_rows[0].max_length == 26
    second = step(run)
    assert (second.rows, second.counts, second.num_drafts) == ([0], [], 3)
    run.deliver()
    step(run)
    received = [len(run.live[1].received)]
    for _ in range(2):
        run.deliver()
        received.append(len(run.live[1].received))
    assert received == [1, 4, 5]
    assert run.live[1].received == undisturbed(range(6), 5, set(), VOCABULARY)


def test_prompt_chunks_and_drafts_share_the_budget() -> None:
    run = driver(0, max_num_seqs=2, max_num_batched_tokens=10)
    run.add(1, range(3), max_tokens=20)
    step(run)
    run.add(2, range(20, 40), max_tokens=2)
    batch = step(run)
    assert (batch.rows, batch.counts, batch.num_drafts) == ([0, 1], [4, 6], 3)


@pytest.mark.parametrize("place", range(6))
def test_a_stop_id_within_accepted_tokens_ends_the_request(place: int) -> None:
    expected = undisturbed([5, 6], 20, set(), VOCABULARY)
    stop = expected[place]
    length = expected.index(stop) + 1
    run = driver(3)
    run.add(1, [5, 6], max_tokens=20, eos=[stop])
    run.run()
    assert run.done[1].received == expected[:length]
    finished = run.done[1].finished
    assert finished is not None and finished.reason is FinishReason.EOS
    assert run.core.stats().generated_tokens == length


@pytest.mark.parametrize("max_tokens", range(1, 11))
@pytest.mark.parametrize("accepted", range(4))
def test_the_length_limit_is_exact(max_tokens: int, accepted: int) -> None:
    run = driver(accepted)
    run.add(1, range(6), max_tokens)
    run.run()
    finished = run.done[1].finished
    assert finished is not None and finished.reason is FinishReason.MAX_TOKENS
    assert len(run.done[1].received) == max_tokens == run.core.stats().generated_tokens


@pytest.mark.parametrize("accepted", range(4))
def test_a_request_may_fill_the_context_and_the_cache(accepted: int) -> None:
    run = driver(accepted, blocks=6, max_model_len=24)
    run.add(1, range(5), max_tokens=19)
    run.run()
    assert len(run.done[1].received) == 19
    assert driver(accepted, blocks=5, max_model_len=24).add(1, range(5), 19).startswith("the KV cache is too")


def test_no_step_is_scheduled_for_a_request_whose_tokens_are_certainly_in_flight() -> None:
    run = driver(3)
    run.add(1, range(6), max_tokens=6)
    step(run)  # 1 token
    step(run)  # 4 tokens
    run.deliver()
    step(run)  # as many as are left, or more
    run.deliver()
    assert run.core.schedule() is None, "one token is left, and a step that samples it is in flight"
    run.run()


def test_blocks_are_reserved_for_the_most_and_no_further_than_the_limit() -> None:
    run = driver(0)
    run.add(1, range(6), max_tokens=8)  # at most 14 tokens: 4 blocks
    step(run)
    assert [len(more.block_ids[0]) for more in step(run).more_blocks] == [1]  # positions 6 to 9
    run.deliver()
    assert [len(more.block_ids[0]) for more in step(run).more_blocks] == [1]  # up to position 13
    run.deliver()
    assert step(run).more_blocks == []
    run.run()


def test_only_accepted_tokens_are_cached() -> None:
    run = driver([0, 2, 1, 3, 0, 0, 0, 0, 0, 0])
    run.add(1, range(6), max_tokens=12)
    run.run()
    conversation = [*range(6), *run.done[1].received]
    run.add(2, [*conversation, 3], max_tokens=1)
    run.run()
    assert run.done[2].cached_tokens == 16  # of 18, the last of which was never computed


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_rows_have_blocks_for_what_a_draft_model_writes(accepted: int) -> None:
    run = driver(accepted, lookahead=3, long_prefill_token_threshold=5)
    run.add(1, range(13), max_tokens=20)
    blocks = end = 0
    while 1 in run.live:
        received = len(run.live[1].received)
        batch = step(run)
        blocks += sum(len(changed.block_ids[0]) for changed in (*batch.new_rows, *batch.more_blocks))
        end = 13 + received + batch.num_drafts if batch.num_drafts else end + batch.counts[0]
        assert min(end + 3, 33) <= blocks * 4
        run.deliver()
    assert len(run.done[1].received) == 20


def test_the_id_after_a_chunk_is_sent_to_workers_that_read_it() -> None:
    for sends, length, wanted in ((True, 12, [[5], [10]]), (True, 10, [[5], []]), (False, 12, [[], []])):
        run = driver(0, long_prefill_token_threshold=5, sends_next_ids=sends)
        run.add(1, range(length), max_tokens=4)
        batches = [run.core.schedule() for _ in wanted]
        assert [unpack_ids(batch.next_ids).tolist() for batch in batches if batch] == wanted


def test_blocks_that_leave_a_window_are_freed_by_the_fewest_computed_tokens() -> None:
    limits = Limits(1, 8, num_drafts=7)
    assert (limits.max_uncertain, limits.max_chunk) == (14, 15)
    for accepted in range(8):
        run = CoreDriver([WINDOW], [6], limits, 48, draft=lambda most, count=accepted: (most, count))
        run.add(1, range(6), max_tokens=40)
        run.run()
        assert len(run.done[1].received) == 40


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_preempted_request_keeps_the_tokens_in_flight(accepted: int) -> None:
    run = driver(accepted, blocks=7, max_model_len=24)
    run.add(1, [1, 1, 1], max_tokens=18)
    run.add(2, [2, 2, 2], max_tokens=18)
    while run.send() and run.core.stats().preemptions == 0:
        if len(run.results) == 2:
            run.deliver()
    assert run.core.stats().running == 1 and run.core.stats().waiting == 1
    before = len(run.live[2].received)
    run.deliver()  # a step that was under way when it was preempted
    assert len(run.live[2].received) == before + 1 + accepted
    run.run()


def test_statistics_count_drafts_by_place() -> None:
    run = driver([3, 1, 0, 2, 3])  # the fifth step runs in vain
    run.add(1, range(6), max_tokens=11)
    run.run()
    stats = run.core.stats()
    assert (stats.num_drafts, stats.num_draft_tokens) == (4, 12)
    assert stats.num_accepted_tokens_per_pos == [3, 2, 1]


def test_rows_without_drafts_are_not_counted() -> None:
    run = CoreDriver([FULL], [64], Limits(4, 40, num_drafts=3), draft=lambda most: (0, 0))
    run.add(1, range(6), max_tokens=5)
    run.run()
    stats = run.core.stats()
    assert (stats.num_drafts, stats.num_accepted_tokens_per_pos) == (0, [0, 0, 0])


def test_the_prediction_is_in_the_row() -> None:
    run = driver(0)
    run.add(1, range(6), 5, prediction_ids=pack_ids([7, 8]))
    assert step(run).new_rows[0].prediction_ids == pack_ids([7, 8])
    plain = CoreDriver([FULL], [64], Limits(4, 40))
    plain.add(1, range(6), 5, prediction_ids=pack_ids([7, 8]))
    assert step(plain).new_rows[0].prediction_ids == b""
    refused = "a prediction of 260 bytes is not 0 to 64 token ids"
    assert run.add(2, range(6), 5, prediction_ids=pack_ids(range(65))) == refused
    assert run.add(2, range(6), 5, prediction_ids=b"123").startswith("a prediction of 3 bytes")


@pytest.mark.parametrize(
    ("counts", "proposed", "ids"),
    [
        ([5], [3], 5),  # more than all drafts
        ([2], [0], 2),  # none was proposed
        ([1], [4], 1),  # more proposed than wanted
        ([0], [3], 0),
        ([1, 1], [3, 3], 2),  # two rows
        ([2], [3], 1),
        ([1], [-1], 1),
    ],
)
def test_a_result_that_does_not_fit_is_refused(counts: list[int], proposed: list[int], ids: int) -> None:
    run = driver(0)
    run.add(1, [1], max_tokens=9)
    run.send()
    run.deliver()
    run.send()
    result = BatchResult(2, bytes(4 * ids), counts=pack_ids(counts), num_proposed=pack_ids(proposed))
    with pytest.raises(ValueError, match="step 2 returned"):
        run.core.update_from_output(result)


def test_a_result_without_drafts_has_no_counts() -> None:
    run = driver(0)
    run.add(1, [1], max_tokens=9)
    run.send()
    with pytest.raises(ValueError, match="returned counts, and it had no drafts"):
        run.core.update_from_output(BatchResult(1, bytes(4), counts=pack_ids([1])))


def test_a_result_with_one_token_each_needs_no_counts() -> None:
    run = driver(0)
    run.add(1, [1], max_tokens=9)
    run.send()
    run.deliver()
    run.send()
    plain = BatchResult(2, run.results.popleft().token_ids)
    run.results.append(plain)
    run.deliver()
    run.run()


def test_limits_without_room_for_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match="has no room for 3 draft tokens of each of 8 sequences"):
        driver(0, max_num_batched_tokens=31)
