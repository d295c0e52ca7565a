"""HTTP processes: restarted on a socket that is held for them, and stopped in steps."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
import zmq

from atom.shared.config.engine import EngineConfig
from atom.shared.config.server import ServerConfig
from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.engine import AddRequest, Sampling, pack_ids
from atom.shared.messages.launch import FrontendLaunch
from atom.shared.messages.resume import Claimed, ClaimedRequest, ClaimedSequence, HandedStream, LeaveStream
from atom.shared.messages.supervisor import Engines, FromControl, Ready, control_identity
from atom.shared.utils.liveness import PeerMonitor
from atom.shared.utils.net import ListenPort
from atom.supervisor import Supervisor
from atom.supervisor import failure as failure_module
from atom.supervisor.control import Control
from atom.supervisor.failure import Failure
from atom.supervisor.frontend import Frontend
from atom.supervisor.life import Life
from atom.supervisor.process import ProcessSpec
from tests.helpers.servers.domains import SLEEP, ScriptDomain, add_child, send, settings_in

LOCAL = "127.0.0.1"
ON_SIGNALS = "[signal.signal(number, lambda *_: got.append(1)) for number in (10, 15)]"
HANDLERS = f"import os, signal, sys, time; got = []; {ON_SIGNALS}; "
TOLD = "os.open(sys.argv[1], os.O_CREAT); "
STUBBORN = f"{HANDLERS}{TOLD}time.sleep(60) or time.sleep(60)"
TWO_SIGNALS = (
    f"{HANDLERS}{TOLD}\nwhile not got: time.sleep(0.01)\nos.open(sys.argv[1] + '.again', os.O_CREAT)"
    "\nwhile len(got) < 2: time.sleep(0.01)\ntime.sleep(1.5); sys.exit(7)"
)

DRAINS = f"{HANDLERS}{TOLD}\nwhile not got: time.sleep(0.01)"
FAILS = f"{DRAINS}\nsys.exit(1)"
CUT = f"{DRAINS}\nos.kill(os.getpid(), 9)"


class ScriptFrontend(Frontend):
    """Every life runs `code`, which may make the file `told` in its directory."""

    code = SLEEP

    def _launch(self, life: Life) -> None:
        self._port.open(self._index)
        told = life.directory / "told"
        add_child(life, self.name, self.code.replace("sys.argv[1]", repr(str(told))))
        if TOLD in self.code:
            while not told.exists():
                time.sleep(0.01)


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(failure_module, "FIRST_DELAY_S", 0.05)
    with Supervisor() as made:
        yield made


@pytest.fixture
def port() -> Iterator[ListenPort]:
    with ListenPort(LOCAL, 0, 2) as made:
        yield made


def add_frontends(supervisor: Supervisor, port: ListenPort, *codes: str) -> list[ScriptFrontend]:
    server = ServerConfig(api_server_count=len(codes))
    settings = settings_in(supervisor.run_dir, supervisor._context, EngineConfig(), server)
    frontends = [ScriptFrontend(i, settings, port, list) for i in range(len(codes))]
    for frontend, code in zip(frontends, codes, strict=True):
        frontend.code = code
        frontend.start()
    supervisor._frontends = list(frontends)
    return frontends


def is_refused(port: ListenPort) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOCAL, port.port)) != 0


def connections_of(port: ListenPort, index: int, tries: int = 60) -> int:
    """How many of `tries` new connections reach a socket that the port has open."""
    with contextlib.ExitStack() as clients:
        for _ in range(tries):
            clients.enter_context(socket.create_connection((LOCAL, port.port), timeout=60))
        listener, count = port.open(index), 0
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                listener.accept()[0].close()
                count += 1
    return count


def kill(supervisor: Supervisor, frontend: ScriptFrontend) -> None:
    """Kill the process; returns once the supervisor has noticed."""
    assert frontend.life is not None
    number = frontend.number
    frontend.life.children[frontend.name].process.kill()
    while frontend.life is not None and frontend.number == number:
        supervisor.check()


def until_restarted(supervisor: Supervisor, frontend: ScriptFrontend) -> None:
    while frontend.life is None:
        supervisor.check()


def test_one_that_ends_is_restarted_alone_and_its_socket_waits(
    supervisor: Supervisor, port: ListenPort
) -> None:
    first, second = add_frontends(supervisor, port, SLEEP, SLEEP)
    supervisor.restart_failed()
    kill(supervisor, second)
    assert connections_of(port, 1) > 5
    until_restarted(supervisor, second)
    assert second.number == 1 and first.number == 0
    assert second.name == "frontend 1"


def test_its_socket_stays_open_however_often_it_fails(supervisor: Supervisor, port: ListenPort) -> None:
    _, second = add_frontends(supervisor, port, SLEEP, SLEEP)
    supervisor.restart_failed()
    kill(supervisor, second)
    until_restarted(supervisor, second)
    kill(supervisor, second)
    assert connections_of(port, 1) > 5


def test_after_two_failures_in_a_row_a_node_with_one_frontend_refuses_connections(
    supervisor: Supervisor, port: ListenPort
) -> None:
    _, second = add_frontends(supervisor, port, SLEEP, SLEEP)
    second._each = 1
    supervisor.restart_failed()
    kill(supervisor, second)
    until_restarted(supervisor, second)
    kill(supervisor, second)
    assert connections_of(port, 0) == 60
    until_restarted(supervisor, second)
    assert connections_of(port, 1) > 5


def test_the_others_are_told_which_accept_no_connections(supervisor: Supervisor, port: ListenPort) -> None:
    frontends = add_frontends(supervisor, port, SLEEP, SLEEP)
    published: list[list[int]] = []
    supervisor._publish = lambda: published.append(supervisor.engine_state.down)  # type: ignore[method-assign]
    supervisor.restart_failed()
    supervisor.check(0)
    assert published == [[0, 1]]
    for each in frontends:
        assert each.life is not None
        send(each.life, Ready(each.name))
    supervisor.check(0)
    supervisor.check(0)
    assert published == [[0, 1], []]
    kill(supervisor, frontends[1])
    assert published[-1] == [1]


def test_one_that_is_silent_accepts_no_connections(supervisor: Supervisor, port: ListenPort) -> None:
    (frontend,) = add_frontends(supervisor, port, SLEEP)
    assert frontend.life is not None
    frontend.life._monitor = PeerMonitor(60.0, warn_s=0.2)
    send(frontend.life, Ready(frontend.name))
    supervisor.check(0)
    assert supervisor.engine_state.down == []
    deadline = time.monotonic() + 60
    while supervisor.engine_state.down != [0]:
        assert time.monotonic() < deadline
        supervisor.check()


def test_each_gets_the_sockets_of_the_others_of_its_node(
    supervisor: Supervisor, port: ListenPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ServerConfig(api_server_count=2)
    settings = settings_in(supervisor.run_dir, supervisor._context, EngineConfig(), server)
    specs: list[ProcessSpec] = []
    monkeypatch.setattr(Life, "spawn", lambda life, node, spec: specs.append(spec))
    for index in range(2):
        frontend = Frontend(index, settings, port, lambda: Engines([]))
        frontend.start()
        assert frontend.life is not None
        frontend.life.close()
        launch = specs[index].launch
        assert isinstance(launch, FrontendLaunch)
        assert list(launch.other_fds) == [1 - index]
        assert specs[index].pass_fds == [launch.listen_fd, *launch.other_fds.values()]
    first, second = (each.launch for each in specs)
    assert isinstance(first, FrontendLaunch) and isinstance(second, FrontendLaunch)
    assert (first.other_fds[1], second.other_fds[0]) == (second.listen_fd, first.listen_fd)


def test_a_frontend_that_does_not_end_is_killed(supervisor: Supervisor, port: ListenPort) -> None:
    (frontend,) = add_frontends(supervisor, port, STUBBORN)
    assert frontend.life is not None
    process = frontend.life.children[frontend.name].process
    monkey = pytest.MonkeyPatch()
    monkey.setattr("atom.supervisor.supervisor._CLIENT_ERRORS_S", 0.2)
    supervisor.stop_frontends(60, hurry=lambda: True)
    monkey.undo()
    assert process.returncode == -9


def test_a_frontend_has_seconds_for_its_clients_after_the_second_signal(
    supervisor: Supervisor, port: ListenPort
) -> None:
    (frontend,) = add_frontends(supervisor, port, TWO_SIGNALS)
    assert frontend.life is not None
    process = frontend.life.children[frontend.name].process
    first_has_come = frontend.life.directory / "told.again"
    supervisor.stop_frontends(60, hurry=first_has_come.exists)
    assert process.returncode == 7


@pytest.mark.parametrize(
    ("code", "engine_dies", "fault"),
    [
        (DRAINS, False, None),
        (DRAINS, True, None),
        (FAILS, False, "frontend: ended with exit status 1"),
        (FAILS, True, "core: killed by SIGKILL"),
        (CUT, False, "frontend: killed by SIGKILL"),
    ],
)
def test_what_happens_to_requests_while_stopping_is_the_fault(
    supervisor: Supervisor, port: ListenPort, code: str, engine_dies: bool, fault: str | None
) -> None:
    """Neither the end of an engine that no request needs, nor that of a frontend that has drained."""
    add_frontends(supervisor, port, code)
    supervisor.restart_failed()
    if engine_dies:
        supervisor._last_engine_failure = Failure("killed by SIGKILL", "core: killed by SIGKILL")
    supervisor.stop_frontends(60, hurry=lambda: False)
    assert (None if supervisor.fault is None else supervisor.fault.text) == fault


def test_all_are_stopped_and_connections_are_refused(supervisor: Supervisor, port: ListenPort) -> None:
    first, second = add_frontends(supervisor, port, SLEEP, SLEEP)
    supervisor.restart_failed()
    assert supervisor.has_frontends and not is_refused(port)
    begun = time.monotonic()
    supervisor.stop_frontends(60, hurry=lambda: False)
    assert time.monotonic() - begun < 30
    assert first.life is None and second.life is None and not supervisor.has_frontends
    assert is_refused(port) and supervisor.fault is None


def test_what_a_server_that_is_replaced_starts_again(supervisor: Supervisor, port: ListenPort) -> None:
    """Its engines, for the requests that it has, but no frontend."""
    first, second = add_frontends(supervisor, port, SLEEP, SLEEP)
    settings = settings_in(supervisor.run_dir, supervisor._context, EngineConfig())
    engine = ScriptDomain("engine", settings)
    engine.start()
    supervisor._engines = [engine]  # type: ignore[list-item]
    supervisor._publish = lambda: None  # type: ignore[method-assign]
    supervisor.restart_failed()
    supervisor.leave()
    assert first.life is not None and engine.life is not None
    first.life.children[first.name].process.kill()
    engine.life.children["core"].process.kill()
    deadline = time.monotonic() + 60
    while engine.number == 0:
        assert time.monotonic() < deadline
        supervisor.check()
    assert engine.life is not None and first.number == second.number == 0
    engine.close()


def test_a_server_whose_successor_has_died_accepts_again(supervisor: Supervisor, port: ListenPort) -> None:
    """By the process that has not ended, and the next life of the one that has."""
    first, second = add_frontends(supervisor, port, SLEEP, SLEEP)
    supervisor.restart_failed()
    supervisor.leave()
    assert first.life is not None and second.life is not None
    first.life.children[first.name].process.kill()
    supervisor.drain_frontends(60, lambda: not first.is_alive)
    supervisor.check()
    assert not is_refused(port)
    supervisor.come_back()
    assert (first.number, second.number) == (1, 0) and first.is_alive and second.is_alive
    kill(supervisor, second)
    assert second.is_down_for_now
    supervisor.stop_frontends(60, hurry=lambda: False)
    assert is_refused(port)


def test_streams_without_an_engine_go_to_the_next_server(supervisor: Supervisor) -> None:
    request = encode(AddRequest([1], pack_ids([1]), 5, Sampling(0.0, 0, 1.0, 0.0, 0)))
    claimed = Claimed(0, "k", [ClaimedRequest(request, [ClaimedSequence(1, b"")])], left_s=60.0)
    control = f"ipc://{supervisor.run_dir}/control"
    supervisor._control = Control(supervisor._context, control, supervisor.handed.take, supervisor._left.add)
    with zmq.Context() as context, context.socket(zmq.DEALER) as frontend:
        frontend.setsockopt(zmq.IDENTITY, control_identity(0))
        frontend.connect(control)
        frontend.send(encode(LeaveStream(0, 3, claimed)))
        deadline = time.monotonic() + 60
        while not frontend.poll(0):
            assert time.monotonic() < deadline
            supervisor.check()
        assert Decoder[FromControl](FromControl).decode(frontend.recv()) == HandedStream(3)
    (left,) = supervisor.take_streams()
    assert (left.key, left.requests) == ("k", claimed.requests) and 0 < left.left_s <= 60
    assert list(supervisor.take_streams()) == []


def test_one_that_waits_for_its_restart_stays_down_while_stopping(
    supervisor: Supervisor, port: ListenPort
) -> None:
    first, second = add_frontends(supervisor, port, SLEEP, SLEEP)
    supervisor.restart_failed()
    kill(supervisor, second)
    supervisor.stop_frontends(60, hurry=lambda: False)
    assert second.number == 0 and second.is_over and first.life is None
    assert is_refused(port)
