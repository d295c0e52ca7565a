"""What drafts cost, from given times of steps."""

import pytest

from tests.helpers.parallel.thread_ranks import on_ranks
from workers.spec_decode import draft_costs
from workers.spec_decode.draft_costs import DraftCosts, StepSeconds, StepTimer

K = 4


def measured(first: float, each: float, drafts: list[int], rows: int = 1, plain: float = 0.013) -> DraftCosts:
    """After steps without drafts, and ones with so many drafts of each row in turn."""
    costs = DraftCosts(K)
    for _ in range(3):
        costs.add(rows, 0, StepSeconds(plain))
    for step in range(40):
        count = drafts[step % len(drafts)]
        seconds = plain * (1 + first + each * count)
        costs.add(rows, rows * count, StepSeconds(0.8 * seconds, drafting=0.2 * seconds))
    return costs


def test_costs_are_estimated_until_both_kinds_of_steps_are_measured() -> None:
    costs = DraftCosts(K, draft_cost=0.1)
    assert costs.of_drafts(1) == (0.0, pytest.approx(1 / 9 + 0.1))
    assert costs.of_drafts(8) == (0.0, pytest.approx(0.5 + 0.1))
    assert costs.of_following(8) == 0.1
    for _ in range(20):
        costs.add(8, 8 * K, StepSeconds(1.0))
    assert costs.of_drafts(8) == (0.0, pytest.approx(0.5 + 0.1)), "compared with nothing"


@pytest.mark.parametrize(("first", "each"), [(1.2, 0.05), (0.0, 0.3), (0.4, 0.4)])
def test_the_first_draft_and_each_are_told_apart(first: float, each: float) -> None:
    """As for a step that is not replayed, and for one whose tokens are expensive."""
    costs = measured(first, each, [1, 4, 2], rows=3)
    found = costs.of_drafts(3)
    assert found == (pytest.approx(first, abs=0.12), pytest.approx(each, abs=0.06))
    assert costs.of_drafts(2) == found, "similar numbers of rows cost alike"
    assert costs.of_drafts(4) == (0.0, 4 / 12), "others are not known"


def test_with_one_number_of_drafts_their_sum_is_known() -> None:
    first, each = measured(1.2, 0.05, [4]).of_drafts(1)
    assert first + 4 * each == pytest.approx(1.4, rel=0.05)


def test_an_interrupted_step_changes_little() -> None:
    costs = measured(0.1, 0.2, [1, 4])
    before = sum(costs.of_drafts(1))
    costs.add(1, 4, StepSeconds(10.0))
    assert sum(costs.of_drafts(1)) < before + 0.5
    for _ in range(3):
        costs.add(1, 0, StepSeconds(10.0))
    assert sum(costs.of_drafts(1)) < before + 0.5


def test_following_is_measured() -> None:
    costs = measured(0.1, 0.2, [2])
    for _ in range(60):
        costs.add(1, 0, StepSeconds(0.013, following=0.0052))
    assert costs.of_following(1) == pytest.approx(0.4, abs=0.02)


def test_now_and_then_a_step_without_drafts_is_due() -> None:
    costs = DraftCosts(K)
    due = []
    for step in range(500):
        drafts = 0 if costs.must_compare(2) else 2 * K
        due += [step] * (not drafts)
        costs.add(2, drafts, StepSeconds(0.02 if drafts else 0.01))
    assert due == [8, 17, 26, 155, 284, 413], "soon until their time is known"


def test_steps_that_cannot_be_compared_are_not_counted() -> None:
    costs = DraftCosts(K)
    for _ in range(50):
        costs.add(1, 0, StepSeconds())
        costs.add(1, 4, StepSeconds(0.0, drafting=0.1))
    assert not costs.must_compare(1) and costs.of_drafts(1) == (0.0, 1 / 9)


def timed(timer: StepTimer, monkeypatch: pytest.MonkeyPatch) -> list[StepSeconds]:
    """Two steps with drafts and one with a prompt; by a clock that goes on where it is set."""
    now = 0.0
    monkeypatch.setattr(draft_costs, "clock", lambda: now)
    found = []
    for compares in (True, True, False):
        timer.begin(compares)
        now += 0.4
        since = now
        now += 0.03
        timer.followed(since)
        now += 0.005
        found.append(timer.step())
        since = now
        now += 0.07
        timer.drafted(since)
    return found


def test_a_step_counts_how_long_its_own_drafts_took(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, mixed = timed(StepTimer(), monkeypatch)
    assert first == StepSeconds(pytest.approx(0.405), pytest.approx(0.03), 0.0)
    assert second == StepSeconds(pytest.approx(0.405), pytest.approx(0.03), pytest.approx(0.07))
    assert mixed == StepSeconds()


def test_ranks_use_the_time_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(tp: draft_costs.Communicator) -> StepSeconds:
        timer = StepTimer()
        timer.tp = tp
        timer.begin(True)
        timer._begun -= 1.0 + tp.rank
        return timer.step()

    monkeypatch.setattr(draft_costs, "clock", lambda: 0.0)
    assert on_ranks(2, run) == [StepSeconds(1.0)] * 2
