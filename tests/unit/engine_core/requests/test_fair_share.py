"""Keys share by tokens: a flood of one does not keep another waiting."""

import itertools

import pytest

from atom.shared.messages.engine import AddRequest, pack_ids
from atom.shared.messages.worker import FullAttentionSpec
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.requests.fair_share import QUANTUM, FairShareQueue
from engine_core.requests.request import Request, SharedSettings
from engine_core.requests.token_ids import Prompt, TokenIds
from engine_core.scheduler import Limits
from tests.helpers.engine.core_driver import GREEDY, CoreDriver

NUMBERS = itertools.count()


def waiting(key: str, replays: int = 0) -> Request:
    number = next(NUMBERS)
    message = AddRequest([number], pack_ids([1, 2]), 1, GREEDY, tenant=key, replays=replays)
    blocks = RequestBlocks(TokenIds(Prompt(message.prompt_ids)), 0, [[]], [0])
    request = Request(number, SharedSettings(message, b"a", 0), GREEDY, -1, blocks)
    request.arrival = number
    return request


def admit(queue: FairShareQueue, tokens: int) -> str:
    """The key of the request that comes first, which computes so many tokens."""
    request = queue.first()
    assert request is not None and queue.first() is request
    queue.remove(request)
    queue.charge(request, tokens)
    return request.settings.tenant


def test_keys_take_turns_by_tokens() -> None:
    queue = FairShareQueue("fcfs")
    for key in ["a"] * 40 + ["b"] * 20:
        queue.add(waiting(key))
    order = []
    for _ in range(30):
        request = queue.first()
        assert request is not None
        order.append(admit(queue, QUANTUM if request.settings.tenant == "b" else QUANTUM // 2))
    assert order == ["a", "a", "b"] * 10


def test_a_large_request_is_paid_for_in_later_turns() -> None:
    queue = FairShareQueue("fcfs")
    for key in ["a"] * 9 + ["b"] * 9:
        queue.add(waiting(key))
    assert admit(queue, 4 * QUANTUM) == "a"
    assert [admit(queue, QUANTUM) for _ in range(6)] == ["b", "b", "b", "b", "a", "b"]


def test_nothing_is_owed_when_nobody_waits() -> None:
    queue = FairShareQueue("fcfs")
    queue.add(waiting("a"))
    assert admit(queue, 100 * QUANTUM) == "a"
    queue.add(waiting("a"))
    queue.add(waiting("b"))
    assert admit(queue, 1) == "a"


def test_requests_that_return_come_first() -> None:
    queue = FairShareQueue("fcfs")
    other, preempted, replayed = waiting("a"), waiting("b"), waiting("b", replays=1)
    preempted.cached_tokens = 0
    replayed.arrival -= 1 << 48
    for request in (other, preempted, replayed):
        queue.add(request)
    found = []
    while (request := queue.first()) is not None:
        queue.remove(request)
        found.append(request)
    assert found == [replayed, preempted, other] and len(queue) == 0


@pytest.mark.parametrize("is_aborted", [False, True])
def test_output_is_paid_for_however_it_ends(is_aborted: bool) -> None:
    """A frontend aborts what a stop string ends."""
    run = CoreDriver([FullAttentionSpec(4, 1)], [64], Limits(1, 16, fair_share=True))
    run.add(1, range(4), max_tokens=8, tenant="a")
    run.add(2, range(4), max_tokens=8, tenant="b")
    while len(run.live[1].received) < 7:
        run.send()
        run.deliver()
    queue = run.core._scheduler._queue
    assert isinstance(queue, FairShareQueue)
    before = queue._deficits["a"]
    if is_aborted:
        run.abort(1)
    while 1 in run.live:
        run.send()
        run.deliver()
    assert before - queue._deficits["a"] == (7 if is_aborted else 8)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="scheduling policy"):
        FairShareQueue("lifo")


def admitted_before(fair_share: bool) -> int:
    """Requests of a flood that are admitted before the only one of another key."""
    run = CoreDriver([FullAttentionSpec(4, 1)], [400], Limits(2, 16, fair_share=fair_share))
    for number in range(60):
        run.add(number, [number % 8] * 40, 4, tenant="flood")
    run.send()
    run.add(60, [3] * 9, 4, tenant="other")
    while 60 not in run.done:
        while run.send():
            pass
        run.deliver()
    count = sum(number in run.done for number in range(60))
    run.run()
    return count


def test_a_flood_of_one_key_does_not_starve_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_core.requests.fair_share.QUANTUM", 50)
    assert admitted_before(fair_share=False) >= 58
    assert admitted_before(fair_share=True) <= 4
