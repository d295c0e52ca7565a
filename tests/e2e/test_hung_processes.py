"""Processes that are stopped, and continued or not: a short stop heals, a long one ends in a restart.

A reader of the log that is stopped stops nothing.
"""

import asyncio
import os
import re
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.helpers.servers.random_server import ARGS, Crowd, abort_all
from tests.helpers.servers.server import Server, running_server

pytestmark = pytest.mark.timeout(240)

STREAMS = 4
DEADLINE_S = 100.0


def pid_of(server: Server, module: str) -> int:
    return next(pid for pid, line in server.children().items() if module in line)


async def get(server: Server, path: str) -> tuple[int, str]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session, session.get(path) as answer:
        return answer.status, await answer.text()


async def until_ready_is(server: Server, status: int) -> str:
    """Returns the body of /ready once it has this status."""
    async with asyncio.timeout(DEADLINE_S):
        while (found := await get(server, "/ready"))[0] != status:
            await asyncio.sleep(0.05)
    return found[1]


async def has_restarted(server: Server) -> bool:
    _, text = await get(server, "/metrics")
    return bool(re.search("^atom:engine_restarts_total.* 1.0$", text, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"), [("workers.main", "worker 0"), ("engine_core.process", "engine core 0")]
)
def test_a_short_stop_heals_and_no_stream_is_lost(model: str, tmp_path: Path, module: str, name: str) -> None:
    crowd, admin = Crowd(STREAMS), tmp_path / "admin"

    async def drive(server: Server) -> None:
        async with crowd.streaming(server):
            pid = pid_of(server, module)
            os.kill(pid, signal.SIGSTOP)
            assert re.search(rf"{name} has not responded for \d+ s", await until_ready_is(server, 503))
            assert re.search("^atom:engine_up.* 0.0$", (await get(server, "/metrics"))[1], re.MULTILINE)
            os.kill(pid, signal.SIGCONT)
            await until_ready_is(server, 200)
            assert re.search("^atom:engine_up.* 1.0$", (await get(server, "/metrics"))[1], re.MULTILINE)
            await crowd.go_on()
            await abort_all(admin)

    limit = ("--hang-timeout", "18", "--admin-socket", str(admin))
    with running_server("--model", model, *ARGS, *limit) as server:
        asyncio.run(drive(server))
        assert crowd.ends == {"finished": STREAMS}
        server.until(f"{name} has not responded for [34] s")
        server.until(f"{name} responds again after")
        assert server.terminate() == 0


@pytest.mark.parametrize(
    ("module", "name", "cause"),
    [
        ("workers.main", "engine", "core: worker 0 has not responded for 6 s"),
        ("engine_core.process", "engine", "core has not responded for 6 s"),
        ("frontend.main", "frontend", "frontend has not responded for 6 s"),
    ],
)
def test_after_a_long_stop_it_is_restarted(
    model: str, tmp_path: Path, module: str, name: str, cause: str
) -> None:
    crowd, admin = Crowd(STREAMS), tmp_path / "admin"

    async def drive(server: Server) -> None:
        async with crowd.streaming(server):
            os.kill(pid_of(server, module), signal.SIGSTOP)
            await asyncio.to_thread(server.until, f"{name}, life 0, has ended: ")
            await crowd.go_on()
            await abort_all(admin)
        await until_ready_is(server, 200)

    limit = ("--hang-timeout", "6", "--admin-socket", str(admin))
    with running_server("--model", model, *ARGS, *limit) as server:
        asyncio.run(drive(server))
        assert crowd.ends == {"cut off" if name == "frontend" else "finished": STREAMS}
        server.until(f"{name}, life 0, has ended: {cause}; life 1 starts in 1 s")
        (path,) = re.findall(r"the stacks of all its processes are in (\S+)", server.text()) or [""]
        # The only process of a frontend's life is the one that is stopped.
        assert bool(path) == (name != "frontend")
        if path:
            text = Path(path).read_text()
            assert text.startswith(f"engine, life 0: {cause}\n") and "T (stopped)" in text
            assert "last step sent: " in text or "most recent call first" in text
        assert server.terminate() == 0


def test_a_short_stop_of_a_frontend_is_logged(model: str) -> None:
    with running_server("--model", model, *ARGS, "--hang-timeout", "12") as server:
        pid = pid_of(server, "frontend.main")
        os.kill(pid, signal.SIGSTOP)
        server.until(r"frontend has not responded for \d s")
        os.kill(pid, signal.SIGCONT)
        server.until("frontend responds again after")
        asyncio.run(until_ready_is(server, 200))
        assert "has ended" not in server.text()
        assert server.terminate() == 0


@pytest.mark.slow
def test_no_connection_waits_for_a_frontend_that_is_stopped(model: str) -> None:
    """The kernel gives half of them to its socket."""

    async def drive(server: Server) -> None:
        answers = await asyncio.gather(*(get(server, "/health") for _ in range(30)))
        assert {status for status, _ in answers} == {200}

    with running_server("--model", model, *ARGS, "--hang-timeout", "30", "--api-server-count", "2") as server:
        os.kill(pid_of(server, "frontend.main"), signal.SIGSTOP)
        asyncio.run(drive(server))
        assert "has ended" not in server.text()


@pytest.mark.slow
def test_streams_go_on_while_the_log_is_not_read(model: str, tmp_path: Path) -> None:
    """An engine dies and starts again meanwhile, which all of its processes and the supervisor log."""
    crowd, admin = Crowd(STREAMS), tmp_path / "admin"

    async def drive(server: Server) -> None:
        async with crowd.streaming(server):
            os.kill(pid_of(server, "workers.main"), signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S):
                while not await has_restarted(server):
                    await asyncio.sleep(0.05)
            await crowd.go_on()
            await abort_all(admin)

    with running_server("--model", model, *ARGS, "--admin-socket", str(admin)) as server:
        with server.unread_log():
            asyncio.run(drive(server))
        assert server.terminate() == 0
    assert re.search(r"\d+ lines were lost: standard error was not read", server.text())
    assert crowd.ends == {"finished": STREAMS}
