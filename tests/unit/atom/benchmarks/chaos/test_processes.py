import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.benchmarks.chaos.processes import (
    ChaosError,
    pause_at_random,
    processes_of,
    resident_bytes,
    supervisor_of,
)

_SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def worker() -> Iterator[int]:
    """A child of this process that looks like a worker."""
    process = subprocess.Popen([sys.executable, "-c", _SLEEP, "workers.main"])
    yield process.pid
    process.kill()
    process.wait(60)


def test_processes_are_found_by_their_module(worker: int) -> None:
    assert processes_of(os.getpid(), "worker") == [worker]
    assert processes_of(os.getpid(), "core") == []
    assert resident_bytes([worker]) > 0


def test_pauses_end(worker: int) -> None:
    """Also where the streams end within one: the process goes on."""

    def state() -> str:
        return Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]

    async def run() -> None:
        until = asyncio.Event()
        task = asyncio.create_task(pause_at_random(os.getpid(), 1000, 0, until))
        async with asyncio.timeout(60):
            while state() != "T":
                await asyncio.sleep(0.001)
            until.set()
            await task
            while state() == "T":
                await asyncio.sleep(0.001)

    asyncio.run(run())


def test_the_admin_socket_tells_the_supervisor(worker: int, tmp_path: Path) -> None:
    path = str(tmp_path / "admin")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        assert supervisor_of(path) == os.getpid()


def test_what_has_no_engines_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "admin")
    with pytest.raises(ChaosError, match="cannot connect to the admin socket"):
        supervisor_of(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(ChaosError, match="has no engines on this host"):
            supervisor_of(path)
