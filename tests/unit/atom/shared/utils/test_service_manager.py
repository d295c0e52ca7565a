"""Messages to systemd: what is sent, when, and that nothing is sent without it."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atom.shared.utils.service_manager import ServiceManager


class Clock:
    """A clock that tests set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def manager_socket(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind(str(tmp_path / "notify"))
        one.settimeout(60)
        yield one


Make = Callable[..., ServiceManager]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes managers that are closed after the test."""
    made: list[ServiceManager] = []

    def new(environment: dict[str, str], clock: Callable[[], float] = time.monotonic) -> ServiceManager:
        made.append(ServiceManager(environment, clock))
        return made[-1]

    yield new
    for manager in made:
        manager.close()


def received(one: socket.socket) -> list[str]:
    """The messages that wait, one string each."""
    one.setblocking(False)
    messages = []
    try:
        while True:
            messages.append(one.recv(4096).decode())
    except BlockingIOError:
        return messages


def test_a_life_of_a_service(make: Make, manager_socket: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": manager_socket.getsockname(), "WATCHDOG_USEC": "10000000"}
    clock = Clock()
    manager = make(environment, clock)
    assert environment == {}
    manager.starting("loading, 1 of 9")
    manager.starting("loading, 2 of 9")
    manager.ready("serving\nmodel")
    assert received(manager_socket) == [
        "EXTEND_TIMEOUT_USEC=60000000\nSTATUS=starting: loading, 1 of 9",
        "READY=1\nSTATUS=serving model",
    ]
    for _ in range(20):
        clock.now += 0.5
        manager.alive()
    assert received(manager_socket) == ["WATCHDOG=1"] * 2
    manager.stopping(50)
    assert received(manager_socket) == [
        "STOPPING=1\nEXTEND_TIMEOUT_USEC=50000000\nSTATUS=running requests may finish"
    ]
    manager.close()
    manager.alive()


def test_an_abstract_socket(make: Make) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind(f"\0atom-test-{os.getpid()}")
        make({"NOTIFY_SOCKET": f"@atom-test-{os.getpid()}"}).ready("up")
        assert received(one) == ["READY=1\nSTATUS=up"]


def test_a_long_watchdog_is_fed_every_few_seconds(make: Make, manager_socket: socket.socket) -> None:
    clock = Clock()
    environment = {"NOTIFY_SOCKET": manager_socket.getsockname(), "WATCHDOG_USEC": "90000000"}
    manager = make(environment, clock)
    for _ in range(10):
        clock.now += 1.0
        manager.alive()
    assert received(manager_socket) == ["WATCHDOG=1"] * 2


def test_a_watchdog_of_another_process_is_not_fed(make: Make, manager_socket: socket.socket) -> None:
    manager = make(
        {"NOTIFY_SOCKET": manager_socket.getsockname(), "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    )
    manager.alive()
    assert received(manager_socket) == []


def test_without_a_manager_nothing_is_sent(make: Make) -> None:
    manager = make({"WATCHDOG_USEC": "1000"})
    manager.starting("loading")
    manager.ready("up")
    manager.alive()
    manager.stopping(1)


def test_a_manager_that_is_gone_disturbs_nothing(make: Make, tmp_path: Path) -> None:
    make({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("up")


@pytest.mark.parametrize(
    "environment",
    [{"NOTIFY_SOCKET": "relative"}, {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "soon"}],
)
def test_bad_variables(environment: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="unset it"):
        ServiceManager(environment)


def test_another_process_becomes_the_main_one(make: Make, manager_socket: socket.socket) -> None:
    """It gets the variables that this process has removed; this one sends nothing more."""
    environment = {"NOTIFY_SOCKET": str(manager_socket.getsockname()), "WATCHDOG_USEC": "1000000"}
    given = dict(environment)
    manager = make(environment)
    assert not environment and manager.environment == given
    manager.replaced_by(77)
    manager.stopping(3.0)
    assert received(manager_socket) == ["MAINPID=77"]
