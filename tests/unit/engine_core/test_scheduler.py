"""Rules of the scheduler, one at a time; test_core_storm.py lets them all meet."""

from typing import Any

import pytest

from atom.shared.messages.engine import FinishReason, pack_ids
from atom.shared.messages.worker import FullAttentionSpec, RecurrentStateSpec, ScheduledBatch
from engine_core.scheduler import Limits
from tests.helpers.engine.core_driver import GREEDY, VOCABULARY, CoreDriver
from tests.helpers.engine.simulated_worker import undisturbed

FULL = FullAttentionSpec(block_size=4, bytes_per_block=1)


def driver(blocks: int = 64, max_model_len: int = 64, **limits: Any) -> CoreDriver:
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **limits}
    return CoreDriver([FULL], [blocks], Limits(**settings), max_model_len)


def step(run: CoreDriver) -> ScheduledBatch:
    """Schedule and execute one step, keeping the batch."""
    batch = run.core.schedule()
    assert batch is not None
    run.results.append(run.worker.execute(batch))
    run.core.check_integrity()
    return batch


def test_a_request_is_prefilled_and_decodes_without_waiting_for_ids() -> None:
    run = driver()
    run.add(1, range(6), max_tokens=3)
    first = step(run)
    assert (first.step, first.rows, first.counts) == (1, [0], [6])
    assert first.new_rows[0].computed == 0 and first.new_rows[0].sampling == GREEDY
    second = step(run)
    assert (second.rows, second.counts, second.new_rows, second.more_blocks) == ([0], [], [], [])
    assert run.core.schedule() is None, "two steps are in flight"
    run.deliver()
    assert run.live[1].received == undisturbed(range(6), 1, set(), VOCABULARY)
    step(run)
    run.deliver()
    assert run.core.schedule() is None, "the third step sampled the last token"
    run.run()
    assert run.core.stats().overlapped_steps == 2


def test_a_prompt_is_cut_to_the_budget() -> None:
    run = driver(max_num_batched_tokens=4)
    run.add(1, range(10), max_tokens=1)
    assert [step(run).counts for _ in range(2)] == [[4], [4]]
    run.deliver()
    assert step(run).counts == [2]
    assert run.core.stats().chunked_prefills == 2
    run.run()


def test_a_long_prompt_leaves_room_for_a_short_one() -> None:
    run = driver(max_num_batched_tokens=12, long_prefill_token_threshold=8)
    run.add(1, range(20), max_tokens=1)
    run.add(2, [1, 2, 3], max_tokens=1)
    assert step(run).counts == [8, 3]
    assert step(run).counts == [8]
    run.run()


def test_steps_in_which_requests_decode_are_shorter() -> None:
    run = driver(max_num_batched_tokens=12, max_num_mixed_tokens=8)
    run.add(1, [1, 2, 3], max_tokens=4)
    run.add(2, range(20), max_tokens=1)
    assert step(run).counts == [3, 9], "nothing decodes yet"
    assert step(run).counts == [1, 7]
    run.deliver()
    assert step(run).counts == [1, 4]
    run.run()


def test_running_requests_come_before_waiting_ones() -> None:
    run = driver(max_num_batched_tokens=4)
    run.add(1, [1, 2], max_tokens=8)
    step(run)
    run.add(2, [3, 4, 5, 6, 7], max_tokens=1)
    batch = step(run)
    assert batch.rows == [0, 1] and batch.counts == [1, 3]


def test_a_tiny_budget_serves_many() -> None:
    run = driver(blocks=600, max_num_seqs=512, max_num_batched_tokens=32)
    for number in range(512):
        run.add(number, [number % VOCABULARY, number // VOCABULARY, 1], max_tokens=3)
    run.run()
    assert len(run.done) == 512


def test_no_more_rows_than_allowed() -> None:
    run = driver(max_num_seqs=2)
    for number in range(3):
        run.add(number, [number], max_tokens=2)
    assert len(step(run).rows) == 2
    assert run.core.stats().waiting == 1
    run.run()


def test_a_later_request_hits_blocks_of_the_same_step() -> None:
    run = driver()
    run.add(1, range(10), max_tokens=2)
    run.add(2, [*range(8), 70], max_tokens=2)
    batch = step(run)
    assert batch.counts == [10, 1]
    assert batch.new_rows[1].computed == 8
    assert batch.new_rows[0].block_ids[0][:2] == batch.new_rows[1].block_ids[0][:2]
    run.run()
    assert (run.done[1].cached_tokens, run.done[2].cached_tokens) == (0, 8)
    assert (run.core.stats().prefix_hits, run.core.stats().prefix_queries) == (8, 19)


def test_generated_blocks_are_hit_by_the_next_turn() -> None:
    run = driver()
    run.add(1, range(6), max_tokens=7)
    run.run()
    conversation = [*range(6), *run.done[1].received]  # 13 tokens, of which 12 were computed
    run.add(2, [*conversation, 3], max_tokens=1)
    run.run()
    assert run.done[2].cached_tokens == 12


def test_blocks_of_a_running_generation_are_hit_as_soon_as_they_are_full() -> None:
    run = driver()
    run.add(1, range(3), max_tokens=30)
    for _ in range(8):
        run.send()
        run.deliver()
    known = [*range(3), *run.live[1].received]
    run.add(2, [*known, 1], max_tokens=1)
    run.run()
    assert run.done[2].cached_tokens == 8


def test_a_stop_id_is_seen_late_and_what_follows_is_dropped() -> None:
    expected = undisturbed([5, 6], 20, set(), VOCABULARY)
    stop = expected[3]
    length = expected.index(stop) + 1
    run = driver()
    run.add(1, [5, 6], max_tokens=20, eos=[stop])
    while 1 in run.live:
        run.send()
        run.send()
        run.deliver()
    assert len(run.results) == 1, "one step too many is in flight"
    assert run.done[1].received == expected[:length]
    assert run.core.stats().kv_blocks_used > 0
    run.deliver()
    assert run.core.stats().kv_blocks_used == 0
    assert run.core.stats().generated_tokens == length


@pytest.mark.parametrize(
    ("eos", "stop", "reason"), [(1, 0, FinishReason.EOS), (0, 1, FinishReason.STOP_TOKEN)]
)
def test_the_reason_depends_on_the_list_that_has_the_id(eos: int, stop: int, reason: FinishReason) -> None:
    first = undisturbed([5], 1, set(), VOCABULARY)
    run = driver()
    run.add(1, [5], 9, eos=first if eos else [], stop=first if stop else [])
    run.run()
    finished = run.done[1].finished
    assert finished is not None and (finished.reason, finished.stop_token_id) == (reason, first[0])


def test_a_stop_id_that_is_also_the_last_token_counts_as_a_stop() -> None:
    run = driver()
    run.add(1, [5], 1, eos=undisturbed([5], 1, set(), VOCABULARY))
    run.run()
    finished = run.done[1].finished
    assert finished is not None and finished.reason is FinishReason.EOS


def test_the_last_admitted_is_preempted_and_keeps_its_tokens() -> None:
    run = driver(blocks=5, max_model_len=20)
    run.add(1, [1, 1, 1], max_tokens=10)
    run.add(2, [2, 2, 2], max_tokens=10)
    while run.send() and run.core.stats().preemptions == 0:
        if len(run.results) == 2:
            run.deliver()
    assert run.core.stats().running == 1 and run.core.stats().waiting == 1
    before = len(run.live[2].received)
    run.deliver()  # a step that was under way when it was preempted
    assert len(run.live[2].received) == before + 1
    run.run()


def test_priority_decides_which_request_waits_and_which_is_preempted() -> None:
    run = driver(blocks=5, max_model_len=20, policy="priority")
    run.add(1, [1, 1, 1], max_tokens=10, priority=5)
    run.add(2, [2, 2, 2], max_tokens=10, priority=-5)
    assert step(run).token_ids == pack_ids([2, 2, 2, 1, 1, 1])
    run.run()
    assert list(run.done) == [2, 1] and run.core.stats().preemptions > 0


def test_a_preempted_prompt_is_counted() -> None:
    run = driver(blocks=8, max_model_len=32, max_num_batched_tokens=5)
    run.add(1, range(8), max_tokens=20)
    run.add(2, range(40, 60), max_tokens=2)
    run.run()
    assert run.core.stats().prefill_preemptions > 0


@pytest.mark.parametrize("moment", range(6))
def test_abort_in_every_state(moment: int) -> None:
    run = driver(blocks=12, max_num_batched_tokens=4, max_num_seqs=1)
    run.add(1, range(6), max_tokens=3)  # queued, two chunks, decodes, draining
    run.add(2, range(6), max_tokens=3)
    for _ in range(moment):
        run.send()
        if len(run.results) == 2:
            run.deliver()
    run.abort(1)
    run.abort(1)
    run.run()
    assert 2 in run.done


def test_an_id_may_be_used_again_after_its_end() -> None:
    run = driver()
    run.add(1, range(6), max_tokens=9)
    run.send()
    run.send()
    run.abort(1)
    run.add(1, range(50, 53), max_tokens=4)
    run.run()
    assert len(run.done[1].received) == 4


def test_new_prompts_are_held_back_while_others_run() -> None:
    run = driver(delay_factor=2.0)
    run.add(1, [1], max_tokens=20)
    run.send()
    run.clock.now += 3.0  # the prompt step takes 3 s
    run.deliver()
    run.add(2, [2], max_tokens=2)
    run.send()
    run.clock.now += 6.0
    run.send()
    assert run.core.stats().waiting == 1, "6 s are not more than 2 * 3 s"
    run.deliver()
    run.clock.now += 0.5
    run.send()
    assert run.core.stats().waiting == 0
    run.run()


def test_the_delay_has_no_effect_while_nothing_runs() -> None:
    run = driver(delay_factor=1e9)
    for number in range(3):
        run.add(number, [number], max_tokens=1)
        run.run()
    assert len(run.done) == 3


def test_a_wrong_result_is_refused() -> None:
    run = driver()
    run.add(1, [1], max_tokens=5)
    run.send()
    with pytest.raises(ValueError, match="out of order"):
        run.core.update_from_output(type(run.results[0])(9, b""))
    with pytest.raises(ValueError, match="returned 2 tokens for 1 rows"):
        run.core.update_from_output(type(run.results[0])(1, b"\0" * 8))


def test_steady_decode_reuses_its_rows() -> None:
    run = driver()
    for number in range(4):
        run.add(number, range(number * 9, number * 9 + 5), max_tokens=30)
    step(run)
    one, two = step(run), None
    run.deliver()
    two = step(run)
    assert one.rows is two.rows and one.counts == two.counts == []
    run.run()


@pytest.mark.parametrize("limits", [{"max_num_seqs": 0}, {"max_num_batched_tokens": 0}, {"policy": "lifo"}])
def test_invalid_limits(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        driver(**limits)


def test_blocks_of_a_victim_of_the_same_call_are_not_sent() -> None:
    run = driver(blocks=3, max_model_len=12, policy="priority")
    run.add(1, [1, 1, 1], max_tokens=8, priority=5)
    run.send()
    run.deliver()
    run.add(2, [2, 2, 2, 2], max_tokens=8, priority=0)
    run.send()
    run.deliver()
    # Both begin a block: the first to join takes the last free one, and loses it to the more urgent one.
    batch = step(run)
    assert batch.rows == [1] and [more.row for more in batch.more_blocks] == [1]
    run.run()


STATES = {"queued": 0, "mid-prefill": 1, "decoding": 3, "draining": 4}


@pytest.mark.parametrize("state", STATES)
def test_an_aborted_request_is_in_no_later_step(state: str) -> None:
    run = driver(max_num_batched_tokens=4)
    run.add(1, range(6), max_tokens=3)  # two chunks, of which the second samples, and two decodes
    rows = [row for _ in range(STATES[state]) for row in lone_step(run)]
    assert set(rows) <= {0}
    run.add(2, range(20, 26), max_tokens=9)
    steps = run.core.stats().steps
    run.abort(1)
    assert len(run.results) <= 2, "what was sent before is all that the device still does"
    later = []
    while run.core.stats().steps < steps + 6:
        if (batch := run.core.schedule()) is not None:
            later.append(batch)
            run.results.append(run.worker.execute(batch))
        else:
            run.deliver()
    (entered,) = [new for batch in later for new in batch.new_rows]
    assert entered.num_known == 6
    # The row of the aborted request may run again only as the other one's.
    assert {row for batch in later for row in batch.rows} == {entered.row}
    run.run()


def lone_step(run: CoreDriver) -> list[int]:
    if len(run.results) == 2:
        run.deliver()
    return step(run).rows


def test_a_request_that_wants_prompt_logprobs_uses_no_cached_prefix() -> None:
    run = driver()
    run.add(1, range(10), max_tokens=1)
    run.run()
    run.add(2, range(10), max_tokens=1, prompt_logprobs=0)
    new = step(run).new_rows[0]
    assert (new.computed, new.prompt_length, new.prompt_logprobs) == (0, 10, 0)
    run.run()
    assert run.done[2].cached_tokens == 0
    assert (run.core.stats().prefix_queries, run.core.stats().prefix_hits) == (10, 0)


def test_blocks_of_a_request_that_wants_prompt_logprobs_are_shared() -> None:
    run = driver()
    run.add(1, range(10), max_tokens=1, prompt_logprobs=0)
    run.add(2, range(10), max_tokens=1)
    run.run()
    assert run.done[2].cached_tokens == 8


def entries_of(run: CoreDriver, request_id: int) -> list[tuple[int, int, int]]:
    """Run to the end; (known tokens, computed, prompt_logprobs) whenever the request takes a row."""
    prompt, entries = run.live[request_id].message.prompt_ids, []
    while run.live:
        batch = run.core.schedule()
        if batch is None:
            run.deliver()
            continue
        run.results.append(run.worker.execute(batch))
        news = [new for new in batch.new_rows if new.prompt_length == len(prompt) // 4]
        entries += [(new.num_known, new.computed, new.prompt_logprobs) for new in news]
    run.run()
    return entries


def test_a_request_preempted_after_its_prompt_wants_no_prompt_logprobs_and_may_hit() -> None:
    run = driver(blocks=6, max_model_len=24)
    run.add(1, [1, 1, 1], max_tokens=14)
    run.add(2, range(7), max_tokens=10, prompt_logprobs=1)
    first, *again = entries_of(run, 2)
    assert first == (7, 0, 1) and again
    assert all(known > 7 and prompt_logprobs == -1 for known, _, prompt_logprobs in again)
    assert any(computed > 0 for _, computed, _ in again), "nothing of it was left in the cache"


def test_a_request_preempted_in_its_prompt_gets_all_prompt_logprobs_again() -> None:
    run = driver(blocks=8, max_model_len=32, max_num_batched_tokens=5)
    run.add(1, range(8), max_tokens=20)
    run.add(2, range(40, 60), max_tokens=2, prompt_logprobs=1)
    first, second, *_ = entries_of(run, 2)
    assert run.core.stats().prefill_preemptions > 0
    assert first == second == (20, 0, 1)


def test_requests_share_under_the_same_salt_alone() -> None:
    run = driver()
    for number, salt in enumerate(["", "a", "b", "a", "", "b"]):
        run.add(number, range(10), max_tokens=1, cache_salt=salt)
        run.run()
    assert [run.done[number].cached_tokens for number in range(6)] == [0, 0, 0, 8, 8, 8]


def test_blocks_of_an_ended_request_whose_last_step_fails_are_not_cached() -> None:
    stop = undisturbed([1, 1, 1], 1, set(), VOCABULARY)
    run = driver()
    run.add(1, [1, 1, 1], 9, stop=stop)
    run.send()
    run.send_failing(lambda rows: rows)  # it computes the stop id, which fills a block
    run.deliver()
    run.deliver()
    run.add(2, [1, 1, 1, *stop, 5], 3)
    run.run()
    assert run.done[2].cached_tokens == 0


def test_a_request_waits_one_step_for_a_slot_that_a_save_takes() -> None:
    """The batch that saves a state frees the slot: no request has to end before."""
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64)
    run = CoreDriver([RecurrentStateSpec(1), FULL], [2, 64], limits)
    run.add(1, range(20), max_tokens=30)
    assert step(run).counts == [16]  # the state is saved after these
    run.add(2, range(40, 45), max_tokens=2)
    batch = step(run)
    assert batch.state_saves and len(batch.rows) == 1
    run.deliver()
    assert len(step(run).new_rows) == 1
    run.run()
