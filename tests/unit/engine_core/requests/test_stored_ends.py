"""Ends of requests that wait until their blocks are stored."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from atom.shared.messages.engine import Finished, FinishReason
from engine_core.kv_tiers.request_tiers import SharedStore
from engine_core.requests.stored_ends import StoredEnds


def request(number: int, stores: bool = True, left: int = 1, frontend: bytes = b"a") -> Any:
    return SimpleNamespace(
        request_id=number,
        frontend=frontend,
        prompt_length=40,
        settings=SimpleNamespace(stores_prompt=stores),
        blocks=SimpleNamespace(shared_store=SharedStore(num_left=left)),
    )


def limit(number: int) -> Finished:
    return Finished(number, FinishReason.MAX_TOKENS)


def test_only_ends_by_the_limit_of_stored_requests_wait() -> None:
    ends = StoredEnds(lambda: 0.0)
    stop = Finished(1, FinishReason.EOS, 7)
    finished = [(request(1), stop), (request(2, stores=False), limit(2)), (request(3), limit(3))]
    assert ends.hold(finished) == finished[:2]
    assert len(ends) == 1 and ends.take() == []
    finished[2][0].blocks.shared_store.num_left = 0
    assert ends.take() == finished[2:] and ends.take() == []


def test_no_end_waits_for_ever_or_for_a_frontend_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    ends = StoredEnds(lambda: now[0])
    slow = request(1)
    assert ends.hold([(slow, limit(1)), (request(2, frontend=b"b"), limit(2))]) == []
    ends.drop(b"b")
    now[0] = 20.0
    with caplog.at_level(logging.WARNING):
        assert ends.take() == [(slow, limit(1))] and len(ends) == 0
    assert "1 KV blocks of a prompt of 40 tokens were not stored within 10 s" in caplog.text
