"""Signals that reach the launcher while it starts or ends what it has started."""

import os
import signal
from collections.abc import Iterator

import pytest

from atom.engine import launcher as launcher_module
from atom.engine.launcher import Launcher
from atom.shared.config.engine import EngineConfig
from atom.shared.config.nodes import NodesConfig
from atom.shared.config.server import ServerConfig
from atom.supervisor import StartError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


class InterruptedSupervisor:
    """Gets a signal while it ends its children, and with `while_it_starts` also before."""

    while_it_starts = False

    def __init__(self, *_: object):
        self.ended = False
        InterruptedSupervisor.latest = self

    latest: "InterruptedSupervisor"

    def __enter__(self) -> "InterruptedSupervisor":
        return self

    def prepare(self, *_: object) -> None:
        if self.while_it_starts:
            os.kill(os.getpid(), signal.SIGTERM)
        raise StartError("no such model", 3)

    def __exit__(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        self.ended = True


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("while_it_starts", [False, True])
def test_a_signal_does_not_interrupt_the_end_of_the_children(
    monkeypatch: pytest.MonkeyPatch, while_it_starts: bool
) -> None:
    monkeypatch.setattr(launcher_module, "Supervisor", InterruptedSupervisor)
    monkeypatch.setattr(InterruptedSupervisor, "while_it_starts", while_it_starts)
    with pytest.raises(SystemExit if while_it_starts else StartError) as raised:
        Launcher(EngineConfig(), ServerConfig(host="127.0.0.1", server_port=0), NodesConfig(), set()).run()
    assert InterruptedSupervisor.latest.ended
    status = raised.value.code if isinstance(raised.value, SystemExit) else raised.value.status  # type: ignore[attr-defined]
    assert status == (0 if while_it_starts else 3)
    # None may change the exit status.
    assert {signal.getsignal(number) for number in SIGNALS} == {signal.SIG_IGN}
