"""Blocks that wait to be stored: requests take turns, and none is counted that was dropped."""

import pytest

from engine_core.kv_tiers import store_queue
from engine_core.kv_tiers.request_tiers import SharedStore
from engine_core.kv_tiers.store_queue import StoreQueue
from engine_core.kv_tiers.tier_copies import Freed


def entry(count: int, store: SharedStore | None = None) -> Freed:
    return Freed([bytes(8)] * count, [b""] * count, [0], count, False, store)


def test_requests_take_turns_until_nothing_is_left() -> None:
    queue = StoreQueue()
    store = SharedStore()
    long, rest, short = entry(1, store), entry(1, store), entry(1, SharedStore())
    for each in (long, rest, short):
        queue.add(each)
    assert len(queue) == 2
    seen = []
    while len(queue):
        first = queue.first()
        seen.append(first)
        queue.done(first, 1)
        queue.end_turn()
        queue.check_integrity()
    assert seen == [long, short, rest] and queue.num_left == 0


def test_a_store_counts_blocks_that_wait_or_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_queue, "_MOST_BLOCKS", 4)
    queue = StoreQueue()
    old, new = SharedStore(), SharedStore()
    queue.add(entry(3, old))
    queue.done(queue.first(), 1)
    assert old.num_left == 3  # one of them is under way
    queue.done(queue.first(), 0)
    assert old.num_left == 2
    queue.add(entry(4, new))
    assert (old.num_left, new.num_left, len(queue)) == (1, 4, 1)
    queue.clear()
    assert (old.num_left, new.num_left, queue.num_left) == (1, 0, 0)
    queue.check_integrity()
