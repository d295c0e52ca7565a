"""Sockets and streams that pass from a running server to a new one, in one process."""

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atom.shared.messages.handover import Leaving, Left, ListeningSockets, Serving
from atom.shared.messages.resume import Claimed
from atom.shared.utils.run_directory import RunDirectory
from atom.supervisor import handover
from atom.supervisor.handover import DeclinedError, HandoverError, NewServer, OldServer

OFFER = ListeningSockets("127.0.0.1", 8000, [0, 2], 3, "unix:/admin", 4)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """That of this process, as of a supervisor."""
    directory = RunDirectory()
    yield directory.path
    directory.close()


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    yield found
    for each in found:
        each.close()


@pytest.fixture
def old(run_dir: Path, listeners: list[socket.socket]) -> Iterator[NewServer]:
    """What the running server has."""
    end = NewServer(run_dir, lambda: (OFFER, [each.fileno() for each in listeners]))
    yield end
    end.close()


def while_polled(end: NewServer, work: Callable[[], object]) -> list[Serving]:
    """Run `work` in a thread, and poll meanwhile; what new servers have said."""
    thread = threading.Thread(target=work)
    thread.start()
    found = []
    while thread.is_alive():
        if (serving := end.poll()) is not None:
            found.append(serving)
            end.send(Leaving("they differ"))
        thread.join(0.01)
    return found


def nothing() -> None:
    """What a new server does while it waits."""


def close(new: OldServer) -> None:
    """A new server ends before it has used its sockets."""
    new.close()
    assert new.admin is not None
    for each in (*new.sockets.values(), new.admin[1]):
        each.close()


def taken(end: NewServer) -> OldServer:
    found: list[OldServer] = []
    while_polled(end, lambda: found.append(OldServer(str(os.getpid()))))
    return found[0]


def test_the_new_server_gets_the_sockets_then_the_streams(
    old: NewServer, listeners: list[socket.socket]
) -> None:
    new = taken(old)
    assert new.offer == OFFER and old.pid == os.getpid()
    assert list(new.sockets) == [0, 2] and new.admin is not None and new.admin[0] == "unix:/admin"
    with new.admin[1], new.sockets[0], new.sockets[2] as taken_over:
        assert taken_over.getsockname() == listeners[1].getsockname()
        listeners[1].close()
        with socket.create_connection(taken_over.getsockname(), 5):  # it still listens
            pass
    differences: list[str] = []
    served = while_polled(old, lambda: differences.append(new.serving({"a": "b"}, True, nothing)))
    assert served == [Serving({"a": "b"}, True)] and differences == ["they differ"]
    assert new.streams() == [] and new.is_connected
    old.send(Claimed(0, "k", left_s=3.0))
    old.send(Left())
    assert new.streams() == [Claimed(0, "k", left_s=3.0)] and not new.is_connected


def test_a_new_server_does_its_work_while_the_old_one_is_stopped(old: NewServer) -> None:
    """It watches its processes, and tells again that it starts."""
    new = taken(old)
    turns: list[int] = []

    def turn() -> None:
        turns.append(0)
        new.starting()
        if len(turns) == 3:
            assert old.poll() == Serving({}, False)
            old.send(Leaving("they differ"))

    assert new.serving({}, False, turn) == "they differ"
    assert len(turns) == 3
    close(new)


def test_a_new_server_that_ends_changes_nothing(old: NewServer) -> None:
    close(taken(old))
    assert old.poll() is None
    again = taken(old)
    assert again.is_connected
    close(again)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_new_server_that_dies_after_its_takeover_is_noticed(old: NewServer, is_stopped: bool) -> None:
    """One that is stopped has not died."""
    new = taken(old)
    while_polled(old, lambda: new.serving({}, False, nothing))
    assert not old.has_died()
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    if is_stopped:
        new.stopping()
    close(new)
    assert not old.has_died()  # its process lives
    old.pid = process.pid
    assert old.has_died() is not is_stopped


def test_a_new_server_that_is_silent_is_given_up(
    old: NewServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after SIGSTOP. It is told so, and must not serve; another one may take over."""
    new = taken(old)
    new.starting()
    monkeypatch.setattr(handover, "_SILENCE_DEADLINE_S", 0.05)
    assert old.poll() is None and not caplog.records
    time.sleep(0.1)
    assert old.poll() is None and old.poll() is None
    (record,) = caplog.records
    assert "does not take over after all, and this server goes on: it is stopped, or hangs" in record.message
    monkeypatch.setattr(new, "_starting_at", 0.0)
    with pytest.raises(DeclinedError, match=f"process {os.getpid()} has given it up: it is stopped"):
        new.starting()
    close(new)
    late = taken(old)
    time.sleep(0.1)
    assert old.poll() is None
    with pytest.raises(DeclinedError):
        late.serving({}, False, nothing)
    close(late)


def test_only_one_server_takes_over_at_a_time(old: NewServer) -> None:
    first = taken(old)
    errors: list[str] = []

    def try_it() -> None:
        try:
            OldServer(str(os.getpid()))
        except HandoverError as error:
            errors.append(str(error))

    while_polled(old, try_it)
    assert errors == [f"--upgrade-from {os.getpid()}: process {os.getpid()} is taking over from it already"]
    close(first)


def failure(target: str = "") -> str:
    """The error of a new server; its target is this process by default."""
    with pytest.raises(HandoverError) as found:
        OldServer(target or str(os.getpid()))
    text = str(found.value)
    assert "Errno" not in text
    return text.removeprefix(f"--upgrade-from {target or os.getpid()}: ")


@pytest.mark.parametrize("target", ["1", "999999999", "/nowhere/admin"])
def test_what_is_no_server_is_an_error_in_one_line(target: str) -> None:
    with pytest.raises(HandoverError, match=f"^--upgrade-from {target}: [^\n]+$"):
        OldServer(target)


def test_an_admin_socket_whose_server_has_ended(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as admin:
        admin.bind(str(tmp_path / "admin"))
    assert "of a running server on this host: if it has ended" in failure(str(tmp_path / "admin"))


def test_a_server_that_starts_or_ends_hands_nothing_over(run_dir: Path) -> None:
    assert failure() == "it still starts: try again when it is ready"
    NewServer(run_dir, lambda: (OFFER, [])).close()
    assert failure().startswith("it ends: wait for its end; if no server runs any more, start this one")


@pytest.mark.parametrize("is_accepted", [False, True])
def test_a_server_that_ends_meanwhile_is_told_in_words(run_dir: Path, is_accepted: bool) -> None:
    """With the connection still in its queue it resets that."""
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor() as pool:
        listener.bind(str(run_dir / "handover"))
        listener.listen()
        found = pool.submit(failure)
        assert select.select([listener], [], [], 5)[0]
        if is_accepted:
            listener.accept()[0].close()
        listener.close()
        text = found.result(5)
    assert text.startswith("it has ended, or has closed the connection: if no server runs any more, start")


@pytest.mark.usefixtures("old")
def test_the_wait_for_the_sockets_can_be_given_up() -> None:
    """As for a running server that is stopped."""

    def give_up() -> None:
        raise SystemExit(5)

    with pytest.raises(SystemExit):
        OldServer(str(os.getpid()), give_up)


def test_a_server_that_accepts_no_connection_is_not_waited_for(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(run_dir / "handover"))
        listener.listen(0)
        first.connect(str(run_dir / "handover"))
        assert failure() == "it is stopped, or hangs: it accepts no connection"


def test_an_admin_socket_leads_to_its_server(old: NewServer, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as admin:
        admin.bind(str(tmp_path / "admin"))
        admin.listen()
        found: list[OldServer] = []
        while_polled(old, lambda: found.append(OldServer(str(tmp_path / "admin"))))
    assert found[0].offer == OFFER
    close(found[0])


def test_nonsense_on_the_socket_is_dropped(old: NewServer, run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(run_dir / "handover"))
        client.sendall(b"\xff\xff\xff\xff")
        client.shutdown(socket.SHUT_WR)
        assert old.poll() is None
        assert client.recv(1) == b""
