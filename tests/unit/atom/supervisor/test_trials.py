"""Frontends that try requests take turns."""

from atom.shared.messages.supervisor import Trial, WantTrial
from atom.supervisor.trials import Trials


def test_turns_go_in_the_order_of_asking() -> None:
    trials = Trials()
    assert trials.want(WantTrial(2, 1)) and trials.current == Trial(2, 1)
    assert not trials.want(WantTrial(0, 1)) and not trials.want(WantTrial(1, 7))
    assert trials.want(WantTrial(2, 2)), "a new wish ends the turn"
    assert trials.current == Trial(0, 1)
    assert not trials.want(WantTrial(1, 0)), "it does not wait any more"
    assert trials.want(WantTrial(0, 0)) and trials.current == Trial(2, 2)
    assert trials.want(WantTrial(2, 0)) and trials.current == Trial()
    assert not trials.want(WantTrial(2, 0))
