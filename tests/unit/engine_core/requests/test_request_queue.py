import pytest

from atom.shared.messages.engine import AddRequest, Sampling, pack_ids
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.requests.request import Request, SharedSettings
from engine_core.requests.request_queue import RequestQueue
from engine_core.requests.token_ids import Prompt, TokenIds


def make(number: int, priority: int = 0) -> Request:
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0)
    message = AddRequest([number], pack_ids([1]), 4, sampling, priority=priority)
    blocks = RequestBlocks(TokenIds(Prompt(message.prompt_ids)), 0, [[]], [0])
    request = Request(number, SharedSettings(message, b"f", 0), sampling, -1, blocks)
    request.arrival, request.arrived_at = number, float(number)
    return request


def drain(queue: RequestQueue) -> list[int]:
    order = []
    while (request := queue.first()) is not None:
        order.append(request.request_id)
        queue.remove(request)
    return order


def test_fcfs_ignores_priority() -> None:
    queue = RequestQueue("fcfs")
    for number, priority in enumerate([5, 1, 3]):
        queue.add(make(number, priority))
    assert drain(queue) == [0, 1, 2]


def test_smaller_priority_first_then_arrival() -> None:
    queue = RequestQueue("priority")
    for number, priority in enumerate([5, 1, 5, -1]):
        queue.add(make(number, priority))
    assert drain(queue) == [3, 1, 0, 2]


def test_a_returning_request_has_its_old_place() -> None:
    queue = RequestQueue("fcfs")
    old, young = make(1), make(2)
    queue.add(young)
    queue.add(old)
    assert queue.oldest_arrival() == 2.0
    assert drain(queue) == [1, 2]


def test_leaving_and_coming_back_leaves_one_entry() -> None:
    queue = RequestQueue("fcfs")
    first, second = make(1), make(2)
    queue.add(first)
    queue.add(second)
    queue.remove(first)
    queue.add(first)
    assert len(queue) == 2 and drain(queue) == [1, 2] and len(queue) == 0


def test_removed_requests_do_not_pile_up() -> None:
    queue = RequestQueue("priority")
    queue.add(make(0, priority=-1))
    for number in range(1, 5000):
        request = make(number)
        queue.add(request)
        queue.remove(request)
    assert len(queue._heap) < 200
    assert drain(queue) == [0]


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="fcfs, priority, not 'lifo'"):
        RequestQueue("lifo")
