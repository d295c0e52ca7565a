from atom.shared.messages.engine import FinishReason
from engine_core.requests.queue_limit import QueueLimit
from tests.helpers.engine.core_driver import CoreDriver
from tests.unit.engine_core.requests.test_resumable import Clock, driver, step


def limited(clock: Clock) -> CoreDriver:
    """At most ten seconds in the queue."""
    run = driver()
    run.core._queue_limit = QueueLimit(10.0, clock)
    run.core._clock = run.core._scheduler._clock = clock
    return run


def test_what_waits_too_long_ends_before_it_is_computed() -> None:
    clock = Clock()
    run = limited(clock)
    for number in range(1, 7):  # four run at once
        run.add(number, range(3), max_tokens=30, frontend=b"ab"[number % 2 :][:1])
    step(run)
    clock.now += 9
    assert run.core.end_overdue() == {}
    clock.now += 2
    ends = run.core.end_overdue()
    reasons = {end.request_id: end.reason for deltas in ends.values() for end in deltas.finished}
    assert reasons == {5: FinishReason.OVERLOADED, 6: FinishReason.OVERLOADED}
    assert set(ends) == {b"a", b"b"} and run.core.num_live == 4
    assert run.core.end_overdue() == {}


def test_what_continues_an_earlier_run_has_waited_already() -> None:
    clock = Clock()
    run = limited(clock)
    run.add(1, range(6), max_tokens=9, prompt_length=4)
    run.add(2, range(6), max_tokens=9, replays=1)
    clock.now += 11
    assert run.core.end_overdue() == {}


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    clock = Clock()
    run = limited(clock)
    run.add(1, range(6), max_tokens=1)
    step(run)
    clock.now += 11
    assert run.core._queue_limit.overdue() == [] and not run.core._queue_limit._queued
