"""Admission: exact at the limit, always released, and the estimate in Retry-After."""

from dataclasses import dataclass

import pytest

import frontend.engine_client.admission as admission_module
from frontend.engine_client.admission import Admission
from frontend.errors import OverloadedError, RequestError
from frontend.metrics.metrics import Metrics


@dataclass
class Engine:
    """A count of live sequences."""

    capacity: int
    live: int = 0
    running_capacity: float = 1.0

    def __len__(self) -> int:
        return self.live


def make(capacity: int) -> tuple[Admission, Engine]:
    engine = Engine(capacity)
    return Admission(engine, capacity, Metrics()), engine


def test_the_last_slot_is_admitted_once() -> None:
    admission, engine = make(2)
    engine.live = 1
    with admission.slot():
        with pytest.raises(OverloadedError) as caught, admission.slot():
            pass
        assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
        assert admission._metrics.refused == 1
    with admission.slot():  # released when the first request ended
        pass


def test_sequences_are_reserved_together_or_not_at_all() -> None:
    admission, _ = make(4)
    with admission.slot() as first:
        first.reserve(3)
        with admission.slot() as second:
            with pytest.raises(OverloadedError):
                second.reserve(2)
            second.reserve(1)
    with admission.slot() as slot:
        slot.reserve(4)


def test_a_sequence_is_counted_once_when_the_engine_has_it() -> None:
    admission, engine = make(3)
    with admission.slot() as slot:
        slot.reserve(2)
        for _ in range(2):
            slot.begin(1)
            engine.live += 1
        with admission.slot():
            pass
        engine.live -= 1  # one has ended while its request still runs
        with admission.slot() as another:
            another.reserve(2)
    engine.live = 2
    with admission.slot():
        pass


def test_a_request_above_the_capacity_is_invalid() -> None:
    admission, _ = make(3)
    with pytest.raises(RequestError, match="3 at most"), admission.slot() as slot:
        slot.reserve(4)
    assert admission._metrics.refused == 0


def test_retry_after_follows_the_rate_of_finished_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(admission_module.time, "monotonic", lambda: clock[0])
    admission, engine = make(1)
    engine.live = 1

    def refusal() -> int:
        with pytest.raises(OverloadedError) as caught:
            admission.check()
        assert caught.value.retry_after_s is not None
        return caught.value.retry_after_s

    assert refusal() == 1  # no sequence has finished yet
    admission.ended(5)  # half a sequence a second
    assert [refusal() for _ in range(5)] == [4, 6, 8, 10, 12]
    admission.ended(1000)
    assert refusal() == 1
    clock[0] += 200  # the rate has decayed
    assert refusal() == 60


def test_retry_after_is_a_minute_at_most() -> None:
    admission, engine = make(1)
    engine.live = 1
    admission.ended()
    waits = []
    for _ in range(100):
        with pytest.raises(OverloadedError) as caught:
            admission.check()
        waits.append(caught.value.retry_after_s)
    assert waits[-1] == 60
    assert waits == sorted(waits)


def test_a_request_that_would_wait_too_long_is_refused_with_the_time_that_is_left() -> None:
    engine = Engine(1000, live=4, running_capacity=4.0)
    admission = Admission(engine, 1000, Metrics(), max_queue_s=3.0)
    admission.check()  # nothing is known about the rate
    admission.ended(10)  # one a second
    admission.check(2)
    assert admission.wait_s(2) == pytest.approx(2.0, rel=0.1)
    engine.live = 12
    with pytest.raises(OverloadedError) as caught:
        admission.check(2)
    assert "would wait for about 10" in caught.value.message and "--max-queue-time" in caught.value.message
    assert caught.value.retry_after_s is not None and 7 <= caught.value.retry_after_s <= 8
