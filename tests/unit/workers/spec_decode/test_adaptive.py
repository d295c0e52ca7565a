"""Rates of acceptance: rows whose drafts fail have fewer, then none for a while, then a few again."""

import numpy as np
import pytest

from workers.spec_decode.adaptive import LONGEST_PAUSE, SHORTEST_PAUSE, AdaptiveDrafts
from workers.spec_decode.draft_costs import StepSeconds

K = 4
NONE = np.zeros(1, np.int64)


def run(made: AdaptiveDrafts, tokens: int, accepts: float) -> tuple[int, int]:
    """One row generates so many tokens, and a share of each draft is accepted.

    Returns how many drafts it verified, and in how many steps it had some.
    """
    row = NONE
    allowed = drafts = steps = done = 0
    while done < tokens:
        accepted = round(accepts * allowed)
        drafts += allowed
        steps += allowed > 0
        done += 1 + accepted
        allowed = int(made.update(row, NONE + 1 + accepted, NONE + allowed)[0])
    return drafts, steps


def test_accepted_drafts_stay() -> None:
    drafts, steps = run(AdaptiveDrafts(3, K), 500, 1.0)
    assert drafts == 4 * steps - 1, "all but the first have four"
    assert steps <= 101


def test_drafts_that_fail_are_tried_again_rarely() -> None:
    made = AdaptiveDrafts(3, K)
    first, _ = run(made, SHORTEST_PAUSE, 0.0)
    assert first <= 8
    drafts, steps = run(made, 20_000, 0.0)
    assert steps <= 2 * (20_000 // LONGEST_PAUSE + 7)
    assert drafts <= 60


def test_a_text_that_begins_to_repeat_gets_its_drafts_back() -> None:
    made = AdaptiveDrafts(3, K)
    run(made, 200, 0.0)
    run(made, 400, 1.0)
    drafts, steps = run(made, 500, 1.0)
    assert drafts == 4 * steps


def test_one_row_does_not_change_another() -> None:
    made = AdaptiveDrafts(2, K)
    both = np.array([0, 1])
    allowed = np.array([0, 0])
    for _ in range(30):
        allowed = made.update(both, 1 + allowed * both, allowed)
    assert allowed.tolist() == [0, K]
    made.add_rows(np.array([0]))
    assert made.update(both, np.array([1, 1]), np.array([0, 0])).tolist()[0] > 1, "a new request begins anew"


def test_a_model_that_does_not_pay_is_off_for_ever_longer() -> None:
    """A request that it did not follow has no drafts any more; a later one has."""
    made = AdaptiveDrafts(1, K, 0.3)
    starts = []
    for request in range(110):
        made.add_rows(NONE)
        if not made.is_off:
            starts.append(request)
            assert made.allowed(NONE)[0] == K
        drafts, _ = run(made, 64, 0.0)
        assert (drafts > 0) == (starts[-1] == request)
    assert starts == [0, 17, 82], "judged within its first request, then off for 16 and 64 of them"


def timed_run(
    made: AdaptiveDrafts, accepts: float, first: float, each: float, following: float = 0.0
) -> tuple[int, float]:
    """As `run`, 3,000 steps of requests of 100, of which those with k drafts take 1 + first + each * k.

    Returns the steps with drafts, and the time of a token, in that of a step without.
    """
    allowed = tokens = drafted = 0
    time = carried = 0.0
    for step in range(3000):
        if step % 100 == 0:
            made.add_rows(NONE)
            allowed = int(made.allowed(NONE)[0])
        carried += accepts * allowed
        accepted = int(carried)
        carried -= accepted
        computing = 1 + (first if allowed else 0.0) + each * allowed
        followed = 0.0 if made.is_off else following
        time += computing + followed
        tokens += 1 + accepted
        drafted += allowed > 0
        seconds = StepSeconds(0.01 * computing, 0.01 * followed)
        allowed = int(made.update(NONE, NONE + 1 + accepted, NONE + allowed, seconds)[0])
    return drafted, time / tokens


@pytest.mark.parametrize(("first", "each"), [(1.5, 0.1), (0.1, 0.9)], ids=["unrecorded", "slow"])
@pytest.mark.parametrize("following", [0.0, 0.3])
def test_drafts_that_cost_more_than_they_bring_are_off(first: float, each: float, following: float) -> None:
    """A third of them is accepted, which by the estimates would do. Each request tries some."""
    _, of_token = timed_run(AdaptiveDrafts(1, K, 0.05 * bool(following)), 0.35, first, each, following)
    assert of_token < 1.04


def test_a_model_that_takes_long_to_follow_is_off() -> None:
    """Its drafts alone would pay."""
    made = AdaptiveDrafts(1, K, 0.05)
    drafted, of_token = timed_run(made, 0.4, 0.0, 0.1, following=0.9)
    assert drafted < 200 and of_token < 1.03
    drafted, of_token = timed_run(AdaptiveDrafts(1, K, 0.05), 0.4, 0.0, 0.1, following=0.1)
    assert drafted > 2500 and of_token < 0.9


@pytest.mark.parametrize("draft_cost", [0.0, 0.05], ids=["text", "model"])
def test_expensive_drafts_that_bring_more_stay(draft_cost: float) -> None:
    drafted, of_token = timed_run(AdaptiveDrafts(1, K, draft_cost), 0.9, 1.2, 0.1, 2 * draft_cost)
    assert drafted > 2900
    assert of_token < 0.65


def test_a_model_that_pays_stays_on() -> None:
    made = AdaptiveDrafts(1, K, 0.3)
    for _ in range(50):
        made.add_rows(NONE)
        drafts, _ = run(made, 64, 1.0)
        assert drafts > 20 and not made.is_off


def test_many_rows_need_more_acceptance() -> None:
    """A row whose drafts are accepted half of the time has drafts alone, and none among 64 rows."""
    few = AdaptiveDrafts(64, K)
    many = AdaptiveDrafts(64, K)
    rows = np.arange(64)
    for step in range(40):
        accepted = step % 2
        alone = few.update(rows[:1], NONE + 1 + accepted, NONE + 1)
        together = many.update(rows, np.full(64, 1 + accepted), np.full(64, 1))
    assert alone[0] > 0
    assert not together.any()
