"""The end of a server under load: by a signal, by a death without restarts, by the launcher's."""

import asyncio
import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.servers.edges import metrics_text
from tests.helpers.servers.random_server import ARGS, Crowd, abort_all, seconds_until_unready
from tests.helpers.servers.server import START_DEADLINE_S, STOP_DEADLINE_S, Server, is_alive, running_server

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("shared_memory_is_left_as_it_was")]

STREAMS = 6
TRIES = 5


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def pid_of(server: Server, module: str) -> int:
    return next(pid for pid, line in server.children().items() if module in line)


def wait_until_gone(pids: list[int], limit_s: float) -> list[int]:
    """Those that still live when the time is over."""
    deadline = time.monotonic() + limit_s
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def last_line(server: Server) -> str:
    server.kill()
    return server.text().splitlines()[-1].strip()


@pytest.mark.parametrize(
    ("victim", "args", "cause"),
    [
        ("workers.main", (), "worker 0: killed by SIGKILL"),
        ("workers.main", ("-tp", "2"), "worker [01]: killed by SIGKILL"),
        ("engine_core.process", (), "core: killed by SIGKILL"),
        ("frontend.main", (), "frontend: killed by SIGKILL"),
    ],
)
def test_without_restarts_a_dead_process_ends_the_server(
    model: str, run_directories: Path, victim: str, args: tuple[str, ...], cause: str
) -> None:
    crowd = Crowd(STREAMS)

    async def drive(server: Server) -> tuple[float, float]:
        async with crowd.streaming(server):
            os.kill(pid_of(server, victim), signal.SIGKILL)
            killed = time.monotonic()
            unready = await seconds_until_unready(server, limit_s=60)
        return unready, time.monotonic() - killed

    with running_server("--model", model, *ARGS, *args, "--max-restarts", "0") as server:
        children = list(server.children())
        unready, ended = asyncio.run(drive(server))
        status = server.process.wait(STOP_DEADLINE_S)
        assert wait_until_gone(children, 0) == []
        line = last_line(server)
    assert unready < 20 and ended < 30
    assert crowd.ends.total() == STREAMS and not {"hung", "finished"} & crowd.ends.keys()
    assert status == 1
    assert re.fullmatch(f"error: {cause}", line)
    if victim != "frontend.main":
        assert crowd.ends == {"error event": STREAMS}
    assert list(run_directories.iterdir()) == []


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_drains_and_the_second_ends(
    model: str, run_directories: Path, number: signal.Signals
) -> None:
    crowd = Crowd(STREAMS)

    async def drive(server: Server) -> tuple[float, float]:
        async with crowd.streaming(server):
            server.process.send_signal(number)
            unready = await seconds_until_unready(server, limit_s=60)
            await crowd.go_on()
            assert not crowd.ends, "draining cut a request off"
            server.process.send_signal(number)
            asked = time.monotonic()
        return unready, time.monotonic() - asked

    with running_server("--model", model, *ARGS) as server:
        children = list(server.children())
        unready, ended = asyncio.run(drive(server))
        assert server.process.wait(STOP_DEADLINE_S) == 0
        assert wait_until_gone(children, 0) == []
    assert unready < 20 and ended < 30
    assert crowd.ends == {"error event": STREAMS}
    assert list(run_directories.iterdir()) == []


def test_two_signals_at_once_end_as_two_do(model: str, run_directories: Path) -> None:
    crowd = Crowd(STREAMS)

    async def drive(server: Server) -> None:
        async with crowd.streaming(server):
            server.process.send_signal(signal.SIGTERM)
            server.process.send_signal(signal.SIGINT)

    with running_server("--model", model, *ARGS) as server:
        asyncio.run(drive(server))
        assert server.process.wait(STOP_DEADLINE_S) == 0
    assert crowd.ends == {"error event": STREAMS}


def test_draining_ends_at_its_deadline(model: str, run_directories: Path) -> None:
    crowd = Crowd(STREAMS)

    async def drive(server: Server) -> None:
        async with crowd.streaming(server):
            server.process.terminate()

    with running_server("--model", model, *ARGS, "--shutdown-timeout", "1") as server:
        begun = time.monotonic()
        asyncio.run(drive(server))
        assert server.process.wait(STOP_DEADLINE_S) == 0
        assert time.monotonic() - begun >= 1
    assert crowd.ends == {"error event": STREAMS}
    assert all("stopping" in message for message in crowd.messages)


def test_draining_lets_requests_finish(model: str, run_directories: Path) -> None:
    crowd = Crowd(STREAMS, max_tokens=400)

    async def drive(server: Server) -> None:
        async with crowd.streaming(server):
            server.process.terminate()

    with running_server("--model", model, *ARGS) as server:
        asyncio.run(drive(server))
        assert server.process.wait(STOP_DEADLINE_S) == 0
    assert crowd.ends == {"finished": STREAMS}


def test_a_worker_that_dies_while_draining_ends_it(model: str, run_directories: Path) -> None:
    crowd = Crowd(STREAMS)

    async def drive(server: Server) -> None:
        async with crowd.streaming(server):
            server.process.terminate()
            await seconds_until_unready(server, limit_s=60)
            os.kill(pid_of(server, "workers.main"), signal.SIGKILL)

    with running_server("--model", model, *ARGS) as server:
        asyncio.run(drive(server))
        assert server.process.wait(STOP_DEADLINE_S) == 1
        assert last_line(server) == "error: worker 0: killed by SIGKILL"
    assert crowd.ends == {"error event": STREAMS}


def test_a_frontend_that_dies_while_draining_is_the_error(model: str) -> None:
    crowd = Crowd(STREAMS)

    async def drive(server: Server) -> None:
        async with crowd.streaming(server):
            server.process.terminate()
            await seconds_until_unready(server, limit_s=60)
            os.kill(pid_of(server, "frontend.main"), signal.SIGKILL)

    with running_server("--model", model, *ARGS) as server:
        asyncio.run(drive(server))
        assert server.process.wait(STOP_DEADLINE_S) == 1
        assert last_line(server) == "error: frontend: killed by SIGKILL"
    assert crowd.ends == {"cut off": STREAMS}


def test_an_engine_that_dies_while_draining_is_no_error_if_all_requests_finish(
    model: str, tmp_path: Path
) -> None:
    crowd, admin = Crowd(STREAMS), tmp_path / "admin"

    async def drive(server: Server) -> None:
        async with asyncio.timeout(STOP_DEADLINE_S):
            while len(re.findall(r"^atom:engine_up.* 1\.0$", metrics_text(server), re.MULTILINE)) < 2:
                await asyncio.sleep(0.05)
        async with crowd.streaming(server):
            server.process.terminate()
            await seconds_until_unready(server, limit_s=60)
            os.kill(pid_of(server, "workers.main"), signal.SIGKILL)
            await crowd.until(lambda: "run again" in server.text())
            await crowd.go_on()
            await abort_all(admin)

    layout = ("-dp", "2", "--dp-load-balance", "round_robin", "--admin-socket", str(admin))
    with running_server("--model", model, *ARGS, *layout) as server:
        asyncio.run(drive(server))
        assert server.process.wait(STOP_DEADLINE_S) == 0
        server.until("run again")
    assert crowd.ends == {"finished": STREAMS}


def test_sigkill_of_the_launcher_leaves_nothing(model: str, run_directories: Path) -> None:
    crowd = Crowd(STREAMS)

    async def drive(server: Server) -> None:
        async with crowd.streaming(server):
            tree = psutil.Process(server.process.pid).children(recursive=True)
            port = port_of(server)
            server.process.kill()
            deadline = time.monotonic() + STOP_DEADLINE_S
            assert wait_until_gone([child.pid for child in tree], STOP_DEADLINE_S) == []
            while is_listening(port) and time.monotonic() < deadline:  # the last thread closes it
                time.sleep(0.02)
            assert not is_listening(port)
            assert len(tree) == 4

    with running_server("--model", model, *ARGS, "-tp", "2") as server:
        asyncio.run(drive(server))
    assert crowd.ends.total() == STREAMS and not {"hung", "finished"} & crowd.ends.keys()
    (left,) = run_directories.iterdir()
    with running_server("--model", model, *ARGS) as server:
        (own,) = run_directories.iterdir()
        assert own != left
        assert server.terminate() == 0
    assert list(run_directories.iterdir()) == []


def died_at_start(server: Server) -> bool:
    """Kill its worker; false if the server was ready by then."""
    deadline = time.monotonic() + START_DEADLINE_S
    while not any("workers.main" in line for line in server.children().values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(pid_of(server, "workers.main"), signal.SIGKILL)
    server.until("^error: |, has ended: ")
    return ", has ended: " not in server.text()


def test_a_process_that_dies_at_start_is_the_cause(model: str, run_directories: Path) -> None:
    for _ in range(TRIES):
        server = Server("--model", model, *ARGS)
        try:
            if died_at_start(server):
                assert server.process.wait(STOP_DEADLINE_S) == 1
                assert last_line(server) == "error: worker 0: killed by SIGKILL"
                assert list(run_directories.iterdir()) == []
                return
        finally:
            server.kill()
    pytest.fail("each server was ready before its worker was killed")


def test_signals_until_it_has_ended_change_nothing(model: str, run_directories: Path) -> None:
    server = Server("--model", model, *ARGS)
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while not any("engine_core.process" in line for line in server.children().values()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while server.process.poll() is None:
            assert time.monotonic() < deadline
            server.process.terminate()
            time.sleep(0.005)
        assert server.process.returncode == 0
    finally:
        server.kill()
    assert list(run_directories.iterdir()) == []


@pytest.mark.slow
def test_three_starts_at_once_are_three_servers(model: str, run_directories: Path) -> None:
    servers = [Server("--model", model, *ARGS) for _ in range(3)]
    try:
        for server in servers:
            server.wait_ready()
        assert len({port_of(server) for server in servers}) == 3
        assert [server.terminate() for server in servers] == [0, 0, 0]
    finally:
        for server in servers:
            server.kill()
    assert list(run_directories.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_starts_after_sigkill_on_the_same_port(model: str, run_directories: Path) -> None:
    """Each is ready, and the files of the one before are gone; shared memory is checked by the fixture."""
    with running_server("--model", model, *ARGS) as first:
        port = port_of(first)
        first.process.kill()
    for _ in range(20):
        server = Server("--model", model, *ARGS, "--server-port", str(port))
        try:
            server.wait_ready()
            assert port_of(server) == port
            assert len(list(run_directories.iterdir())) == 1
            server.process.kill()
        finally:
            server.kill()
    with running_server("--model", model, *ARGS) as last:
        assert last.terminate() == 0
    assert list(run_directories.iterdir()) == []
