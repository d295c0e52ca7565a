import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.benchmarks.chaos.processes import ChaosError, processes_of, resident_bytes, supervisor_of

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
