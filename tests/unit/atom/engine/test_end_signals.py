"""Signals are counted where they come, and end what is done where that is asked for."""

import signal
from collections.abc import Iterator

import pytest

from atom.engine.end_signals import EndSignals
from atom.supervisor import StartError

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_at_the_next_check(number: int) -> None:
    with EndSignals() as signals:
        signals.check()
        signal.raise_signal(number)
        assert signals.count == 1
        with pytest.raises(SystemExit) as end:
            signals.check()
    assert end.value.code == 128 + number


def test_the_status_is_that_of_the_first_signal_or_the_given_one() -> None:
    for status, expected in ((None, 128 + signal.SIGTERM), (0, 0)):
        with EndSignals(status) as signals:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert signals.count == 2
            with pytest.raises(SystemExit) as end:
                signals.check()
        assert end.value.code == expected


def test_no_signal_changes_the_exit_status_of_an_end() -> None:
    with EndSignals():
        pass
    for number in NUMBERS:
        signal.raise_signal(number)


def test_an_ignored_hangup_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with EndSignals() as signals:
        signal.raise_signal(signal.SIGHUP)
        signals.check()


def test_the_second_kills_if_it_may() -> None:
    with EndSignals(second_kills=True) as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.count == 1
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL


@pytest.mark.parametrize("is_signalled", [False, True])
def test_a_failure_after_a_signal_is_not_told(is_signalled: bool) -> None:
    with (
        EndSignals() as signals,
        pytest.raises(SystemExit if is_signalled else StartError),
        signals.before_failures(),
    ):
        if is_signalled:
            signal.raise_signal(signal.SIGTERM)
        raise StartError("the child was killed")
