"""Profiling: every order of frontends' requests and ranks' responses."""

import pytest

from atom.shared.messages.profile import Profile, ProfileResult, RankTrace
from engine_core.profiling import Outcome, Profiling

RANKS = 2
A, B = b"first", b"second"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def profiling(clock: Clock) -> Profiling:
    return Profiling(RANKS, True, clock)


def all_ranks(profiling: Profiling, on: bool) -> Outcome:
    assert profiling.add_trace(RankTrace(1, on)) is None
    outcome = profiling.add_trace(RankTrace(0, on))
    assert outcome is not None
    return outcome


def refusal(profiling: Profiling, on: bool) -> str:
    response = profiling.request(Profile(on, 9), B)
    assert response is not None and (response.number, response.on, response.error) == (9, on, "")
    return response.refusal


def test_a_profile_from_start_to_stop(profiling: Profiling) -> None:
    assert profiling.request(Profile(True, 1), A) is None and profiling.is_timed
    assert all_ranks(profiling, True) == Outcome(
        A, ProfileResult(1, True, [RankTrace(0, True), RankTrace(1, True)])
    )
    assert profiling.request(Profile(False, 2), B) is None
    outcome = all_ranks(profiling, False)
    assert (outcome.frontend, outcome.result.number, outcome.stop) == (B, 2, False) and not profiling.is_timed
    assert profiling.request(Profile(True, 3), A) is None


def test_requests_that_do_not_fit_the_state_are_refused_and_change_nothing(profiling: Profiling) -> None:
    assert refusal(profiling, False) == "profiling is not on"
    profiling.request(Profile(True), A)
    for on in (True, False):
        assert "being started" in refusal(profiling, on)
    assert all_ranks(profiling, True).frontend == A
    assert refusal(profiling, True) == "profiling is on already"
    profiling.request(Profile(False), A)
    for on in (True, False):
        assert "being written" in refusal(profiling, on)
    assert all_ranks(profiling, False).frontend == A
    assert "--torch-profiler-dir" in refusal(Profiling(RANKS, False), True)


def test_a_rank_that_cannot_start_stops_the_others(profiling: Profiling) -> None:
    profiling.request(Profile(True, 1), A)
    profiling.add_trace(RankTrace(0, True))
    outcome = profiling.add_trace(RankTrace(1, True, error="no space"))
    assert outcome is not None and outcome.stop
    assert outcome.frontend == A and outcome.result.error == "worker 1: no space"
    assert "being written" in refusal(profiling, True)
    assert all_ranks(profiling, False).frontend is None
    assert profiling.request(Profile(True), A) is None


def test_a_trace_that_cannot_be_written_is_reported(profiling: Profiling) -> None:
    profiling.request(Profile(True), A)
    all_ranks(profiling, True)
    profiling.request(Profile(False), A)
    profiling.add_trace(RankTrace(0, False, error="no space"))
    outcome = profiling.add_trace(RankTrace(1, False, file="f"))
    assert outcome is not None and not outcome.stop
    assert outcome.result.error == "worker 0: no space" and outcome.result.traces[1].file == "f"
    assert profiling.request(Profile(True), A) is None


def test_a_request_times_out_while_a_rank_does_not_respond(profiling: Profiling, clock: Clock) -> None:
    profiling.request(Profile(True, 5), A)
    profiling.add_trace(RankTrace(0, True))
    clock.now = 299.0
    assert profiling.overdue() is None
    clock.now = 300.0
    outcome = profiling.overdue()
    assert outcome is not None and outcome.frontend == A and outcome.result.number == 5
    assert outcome.result.error == "waited 300 s for worker 1 to start or write its trace"
    assert profiling.overdue() is None and not profiling.is_timed
    assert "being started" in refusal(profiling, True)
    late = profiling.add_trace(RankTrace(1, True))
    assert late is not None and late.frontend is None
    assert profiling.request(Profile(False), A) is None


def test_a_recording_is_stopped_after_its_longest_time_and_its_traces_are_kept(
    profiling: Profiling, clock: Clock
) -> None:
    profiling.request(Profile(True, 1), A)
    all_ranks(profiling, True)
    clock.now = 599.0
    assert profiling.is_timed and profiling.overdue() is None
    clock.now = 600.0
    outcome = profiling.overdue()
    assert outcome is not None and outcome.stop and outcome.frontend is None
    assert profiling.overdue() is None
    assert "being written" in refusal(profiling, False)
    traces = [RankTrace(rank, False, file=f"f{rank}") for rank in range(RANKS)]
    for trace in traces:
        profiling.add_trace(trace)
    assert profiling.request(Profile(False, 2), B) == ProfileResult(2, False, traces)
    assert refusal(profiling, False) == "profiling is not on"
    assert profiling.request(Profile(True, 3), A) is None
