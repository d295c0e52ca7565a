"""Places: exact at the limit, given back on every way out, and an estimate for those outside."""

import pytest

from frontend import admission
from frontend.admission import Admission
from frontend.errors import OverloadedError, RequestError


class Engine:
    """Counts the choices that it was given."""

    def __init__(self) -> None:
        self.live = 0

    def count(self) -> int:
        return self.live


def make(capacity: int) -> tuple[Admission, Engine]:
    engine = Engine()
    return Admission(capacity, engine.count), engine


def test_the_last_place_is_given_once() -> None:
    gate, engine = make(2)
    engine.live = 1
    with gate.place():
        with pytest.raises(OverloadedError) as caught, gate.place():
            pass
        assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
        assert gate.refused == 1
    with gate.place():  # given back when the first request left
        pass


def test_choices_take_their_places_together_or_not_at_all() -> None:
    gate, _ = make(4)
    with gate.place() as first:
        first.take([1, 2, 3])
        with gate.place() as second:
            with pytest.raises(OverloadedError):
                second.take([4, 5])
            second.take([4])
    with gate.place() as place:
        place.take([6, 7, 8, 9])


def test_a_choice_is_counted_once_when_the_engine_has_it() -> None:
    gate, engine = make(3)
    with gate.place() as place:
        place.take([1, 2])
        for request_id in (1, 2):
            assert gate.begin(request_id) == place.arrived_at
            engine.live += 1
        with gate.place():
            pass
        engine.live -= 1  # one has ended while its request still runs
        with gate.place() as another:
            another.take([3, 4])
    engine.live = 2
    with gate.place():
        pass


def test_a_request_that_never_fits_is_the_clients_mistake() -> None:
    gate, _ = make(3)
    with pytest.raises(RequestError, match="3 at most"), gate.place() as place:
        place.take([1, 2, 3, 4])
    assert gate.refused == 0


def test_retry_after_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(admission.time, "monotonic", lambda: clock[0])
    gate, engine = make(1)
    engine.live = 1

    def refusal() -> int:
        with pytest.raises(OverloadedError) as caught:
            gate.check()
        assert caught.value.retry_after_s is not None
        return caught.value.retry_after_s

    assert refusal() == 1  # nothing is known yet
    gate.ended(5)  # half a choice a second
    assert [refusal() for _ in range(5)] == [4, 6, 8, 10, 12]
    gate.ended(1000)
    assert refusal() == 1
    clock[0] += 200  # the pace is forgotten
    assert refusal() == 60


def test_retry_after_is_a_minute_at_most() -> None:
    gate, engine = make(1)
    engine.live = 1
    gate.ended()
    waits = []
    for _ in range(100):
        with pytest.raises(OverloadedError) as caught:
            gate.check()
        waits.append(caught.value.retry_after_s)
    assert waits[-1] == 60
    assert waits == sorted(waits)
