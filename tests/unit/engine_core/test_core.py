import pytest

from atom.messages.engine import AddRequest, FinishReason, unpack_ids
from atom.messages.worker import FullAttentionSpec
from engine_core.scheduler import Limits
from tests.helpers.core_driver import GREEDY, CoreDriver

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
def test_what_can_never_run_is_refused_and_nobody_notices(prompt: int, max_tokens: int, message: str) -> None:
    run = driver()
    run.add(1, range(5), max_tokens=8)
    run.send()
    assert message in run.add(2, range(prompt), max_tokens)
    run.run()
    assert list(run.done) == [1]


def test_a_request_may_fill_the_cache_to_its_last_slot() -> None:
    run = driver()
    assert run.add(1, range(12), max_tokens=5) == ""  # the 17th token is drawn, but never computed
    run.run()


def test_a_used_id_is_refused() -> None:
    run = driver()
    run.add(1, [1], max_tokens=4)
    refusal = run.core.add(run.live[1].message, b"a")
    assert refusal is not None and refusal.finished[0].message == "request id 1 is in use"


def test_torn_prompt_bytes_are_refused() -> None:
    refusal = driver().core.add(AddRequest(1, b"12345", 1, GREEDY), b"a")
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
    drawn = list(unpack_ids(result.token_ids))
    deltas = run.core.update(result)
    assert deltas[b"a"].request_ids == [1, 3] and deltas[b"b"].request_ids == [2]
    assert list(unpack_ids(deltas[b"a"].token_ids)) == [drawn[0], drawn[2]]
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
