"""A frontend tries requests in its own turn alone, and knows those of others."""

import pytest

from atom.shared.messages.supervisor import Trial
from frontend.engine_client import trial_turn
from frontend.engine_client.trial_turn import TrialTurn


def test_a_single_frontend_always_has_the_turn() -> None:
    turn = TrialTurn()
    assert turn.is_alone and turn.ask() and not turn.is_of_another
    turn.leave()
    assert turn.ask()


def test_an_earlier_turn_is_not_taken_for_the_one_that_was_asked_for() -> None:
    wanted: list[int] = []
    turn = TrialTurn(1, wanted.append)
    assert not turn.ask() and not turn.ask() and wanted == [1]
    turn.set_current(Trial(1, 1))
    assert turn.ask() and not turn.is_of_another
    turn.leave()
    turn.leave()
    assert not turn.ask() and wanted == [1, 0, 2]
    turn.set_current(Trial(1, 1))  # sent before the supervisor knew
    assert not turn.ask()
    turn.set_current(Trial(1, 2))
    assert turn.ask()


def test_the_turn_of_another_counts_for_a_moment_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = TrialTurn(1, lambda number: None)
    turn.set_current(Trial(0, 4))
    assert turn.is_of_another
    turn.set_current(Trial())
    assert turn.is_of_another
    monkeypatch.setattr(trial_turn, "_NEWS_S", 0.0)
    turn.set_current(Trial(0, 5))
    turn.set_current(Trial(1, 1))
    assert not turn.is_of_another
