from typing import Any

import msgspec
import pytest

from atom.shared.messages.engine import AddRequest, FinishReason, TokenDeltas, unpack_ids
from atom.shared.messages.worker import BatchResult, FullAttentionSpec, RowFailure
from engine_core.scheduler import Limits
from tests.helpers.engine.core_driver import GREEDY, CoreDriver
from tests.helpers.engine.simulated_worker import unpack_scores

FULL = FullAttentionSpec(block_size=4, bytes_per_block=1)


def driver(blocks: int = 4) -> CoreDriver:
    return CoreDriver([FULL], [blocks], Limits(4, 16), max_model_len=24)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (20, 5, "a prompt of 20 tokens and max_tokens=5 exceed the context of 24 tokens"),
        (12, 6, "the KV cache is too small for a sequence of 18 tokens"),
        (0, 5, "needs a prompt"),
        (5, 0, "max_tokens of at least 1"),
    ],
)
def test_a_request_that_can_never_run_is_refused_alone(prompt: int, max_tokens: int, message: str) -> None:
    run = driver()
    run.add(1, range(5), max_tokens=8)
    run.send()
    assert message in run.add(2, range(prompt), max_tokens)
    run.run()
    assert list(run.done) == [1]


def test_a_request_may_fill_the_cache_to_its_last_slot() -> None:
    run = driver()
    assert run.add(1, range(12), max_tokens=5) == ""  # the 17th token is sampled, but never computed
    run.run()


def test_a_used_id_is_refused() -> None:
    run = driver()
    run.add(1, [1], max_tokens=4)
    refusal = run.core.add(run.live[1].message, b"a")
    assert refusal is not None and refusal.finished[0].message == "request id 1 is in use"


def test_prompt_bytes_that_are_no_whole_number_of_ids_are_refused() -> None:
    refusal = driver().core.add(AddRequest([1], b"12345", 1, GREEDY), b"a")
    assert refusal is not None and refusal.finished[0].reason is FinishReason.ERROR
    assert "5 bytes is not a whole number of token ids" in refusal.finished[0].message


def test_each_frontend_gets_its_own_tokens() -> None:
    run = driver(blocks=16)
    run.add(1, [1], max_tokens=2, frontend=b"a")
    run.add(2, [2], max_tokens=1, frontend=b"b")
    run.add(3, [3], max_tokens=2, frontend=b"a")
    batch = run.core.schedule()
    assert batch is not None
    result = run.worker.execute(batch)
    sampled = list(unpack_ids(result.token_ids))
    deltas = run.core.update_from_output(result)
    assert deltas[b"a"].request_ids == [1, 3] and deltas[b"b"].request_ids == [2]
    assert list(unpack_ids(deltas[b"a"].token_ids)) == [sampled[0], sampled[2]]
    assert [first.request_id for first in deltas[b"a"].first] == [1, 3]
    assert deltas[b"a"].finished == [] and deltas[b"b"].finished[0].reason is FinishReason.MAX_TOKENS


def test_the_requests_of_a_lost_frontend_end() -> None:
    run = driver(blocks=16)
    for number, frontend in enumerate([b"a", b"b", b"a"]):
        run.add(number, [number], max_tokens=9, frontend=frontend)
    run.send()
    assert run.core.abort_frontend(b"a") == 2
    del run.live[0], run.live[2]
    run.run()
    assert list(run.done) == [1]


def test_stats() -> None:
    run = driver(blocks=16)
    run.add(1, range(6), max_tokens=4)
    run.add(2, range(9), max_tokens=4)
    run.send()
    stats = run.core.stats()
    assert (stats.steps, stats.running, stats.waiting) == (1, 2, 0)
    assert (stats.kv_blocks_used, stats.kv_blocks_total) == (4, 16)
    assert (stats.prompt_tokens, stats.generated_tokens) == (15, 0)
    run.run()
    stats = run.core.stats()
    assert (stats.running, stats.kv_blocks_used, stats.generated_tokens) == (0, 0, 8)
    assert (stats.prefill_tokens, stats.kv_blocks_cached) == (11, 4)  # one block is shared


def with_logprobs(most_likely: int) -> dict[str, Any]:
    return {"sampling": msgspec.structs.replace(GREEDY, logprobs=most_likely)}


def one_step(run: CoreDriver) -> tuple[BatchResult, dict[bytes, TokenDeltas]]:
    batch = run.core.schedule()
    assert batch is not None
    result = run.worker.execute(batch)
    return result, run.core.update_from_output(result)


def test_log_probabilities_pass_untouched_to_the_only_frontend() -> None:
    run = driver(blocks=16)
    run.add(1, [1], max_tokens=2)
    run.add(2, [2], max_tokens=2, **with_logprobs(1))
    result, deltas = one_step(run)
    assert result.logprobs is not None and deltas[b"a"].logprobs is result.logprobs
    assert deltas[b"a"].logprobs.indices == [1]


def test_log_probabilities_are_split_by_frontend_with_new_indices() -> None:
    run = driver(blocks=16)
    for number, frontend, most_likely in [(1, b"a", 2), (2, b"b", 0), (3, b"c", -1), (4, b"b", 1)]:
        run.add(number, [number], max_tokens=2, frontend=frontend, **with_logprobs(most_likely))
    result, deltas = one_step(run)
    assert result.logprobs is not None
    rows = unpack_scores(result.logprobs.table)
    first, second, third = (deltas[frontend].logprobs for frontend in (b"a", b"b", b"c"))
    assert first is not None and second is not None and third is None
    assert (first.indices, unpack_scores(first.table)) == ([0], rows[:1])
    assert (second.indices, unpack_scores(second.table)) == ([0, 1], rows[1:])


def test_log_probabilities_of_an_ended_request_are_dropped() -> None:
    run = driver(blocks=16)
    for number in (1, 2, 3):
        run.add(number, [number], max_tokens=5, **with_logprobs(0))
    batch = run.core.schedule()
    assert batch is not None
    run.core.abort([2])
    result = run.worker.execute(batch)
    delta = run.core.update_from_output(result)[b"a"]
    assert delta.request_ids == [1, 3] and delta.logprobs is not None and result.logprobs is not None
    rows = unpack_scores(result.logprobs.table)
    assert (delta.logprobs.indices, unpack_scores(delta.logprobs.table)) == ([0, 1], [rows[0], rows[2]])


def test_prompt_logprobs_of_a_step_without_sampled_tokens_are_sent() -> None:
    run = CoreDriver([FULL], [16], Limits(4, 4), max_model_len=24)
    run.add(7, range(6), max_tokens=1, prompt_logprobs=1)
    _, deltas = one_step(run)
    (chunk,) = deltas[b"a"].prompt_logprobs
    assert (deltas[b"a"].request_ids, chunk.owner, chunk.start) == ([], 7, 1)
    assert len(unpack_scores(chunk.table)) == 4  # tokens 1 .. 4, after 0 .. 3
    _, deltas = one_step(run)
    (chunk,) = deltas[b"a"].prompt_logprobs
    assert (deltas[b"a"].request_ids, chunk.start, len(unpack_scores(chunk.table))) == ([7], 5, 1)


def test_each_frontend_gets_the_logprobs_of_its_own_prompts() -> None:
    run = CoreDriver([FULL], [16], Limits(4, 8), max_model_len=24)
    run.add(1, range(4), max_tokens=1, frontend=b"a", prompt_logprobs=0)
    run.add(2, range(10, 16), max_tokens=1, frontend=b"b", prompt_logprobs=0)
    _, deltas = one_step(run)  # 4 tokens of each
    owners = {frontend: [one.owner for one in delta.prompt_logprobs] for frontend, delta in deltas.items()}
    assert owners == {b"a": [1], b"b": [2]}
    assert deltas[b"b"].request_ids == []


def test_steps_of_prompt_chunks_alone_send_nothing() -> None:
    run = CoreDriver([FULL], [16], Limits(4, 4), max_model_len=24)
    run.add(7, range(6), max_tokens=1)
    assert one_step(run)[1] == {}


def test_prompt_logprobs_of_an_ended_request_are_dropped() -> None:
    run = driver(blocks=16)
    run.add(1, range(6), max_tokens=5, prompt_logprobs=0)
    batch = run.core.schedule()
    assert batch is not None
    result = run.worker.execute(batch)
    assert result.prompt_logprobs
    run.core.abort([1])
    assert run.core.update_from_output(result) == {}


def test_log_probabilities_that_fit_no_row_are_an_error() -> None:
    run = driver(blocks=16)
    run.add(1, range(6), max_tokens=5, prompt_logprobs=0, **with_logprobs(0))
    batch = run.core.schedule()
    assert batch is not None
    result = run.worker.execute(batch)
    (chunk,), logprobs = result.prompt_logprobs, result.logprobs
    assert logprobs is not None
    replace = msgspec.structs.replace
    for wrong, message in [
        (
            replace(result, prompt_logprobs=[replace(chunk, owner=3)]),
            "prompt log probabilities that fit no row",
        ),
        (replace(result, logprobs=replace(logprobs, indices=[1])), "do not fit its sampled tokens"),
        (replace(result, logprobs=replace(logprobs, indices=[0, 0])), "do not fit its sampled tokens"),
    ]:
        run = driver(blocks=16)
        run.add(1, range(6), max_tokens=5, prompt_logprobs=0, **with_logprobs(0))
        run.core.schedule()
        with pytest.raises(ValueError, match=message):
            run.core.update_from_output(wrong)


def test_the_first_token_has_queue_and_prefill_times() -> None:
    run = CoreDriver([FULL], [16], Limits(4, 4), max_model_len=24)
    run.add(1, range(6), max_tokens=1)
    run.clock.now += 2.0  # in the queue
    run.send()
    run.clock.now += 0.25
    run.deliver()
    run.send()
    run.clock.now += 0.5
    run.deliver()
    first = run.done[1].first
    assert first is not None and (first.queued_s, first.prefill_s) == (2.0, 0.75)


def test_a_failed_row_ends_its_request_alone() -> None:
    run = driver(blocks=16)
    for number in (1, 2, 3):
        run.add(number, [number] * 5, max_tokens=4)
    run.send_failing(lambda rows: [rows[1]])
    run.run()
    assert list(run.failed) == [2] and sorted(run.done) == [1, 3]
    run.add(4, [2] * 5, max_tokens=4)
    run.run()
    assert run.done[4].cached_tokens == 0, "the blocks of a failed step are not cached"


def test_a_failure_of_a_row_that_does_not_run_is_an_error() -> None:
    run = driver()
    run.add(1, [1], max_tokens=5)
    run.send()
    with pytest.raises(ValueError, match="rows that it did not run"):
        run.core.update_from_output(
            msgspec.structs.replace(run.results[0], failed=[RowFailure(3, "out of memory")])
        )


def test_the_sequences_of_a_request_differ_only_in_their_index() -> None:
    run = driver(blocks=16)
    run.add(7, range(9), max_tokens=2, n=3)
    batch = run.core.schedule()
    assert batch is not None
    assert [new.sampling.sequence for new in batch.new_rows] == [0, 1, 2]
    assert [new.computed for new in batch.new_rows] == [0, 8, 8]
    result = run.worker.execute(batch)
    assert run.core.update_from_output(result)[b"a"].request_ids == [7, 8, 9]
