"""A process for files: it shares rows with the worker, and ends with it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from atom.shared.utils.process import module_environment
from workers.memory import file_worker
from workers.memory.block_files import BlockFile
from workers.memory.file_worker import FileWorker

DEADLINE_S = 60.0
FILES = [BlockFile(f"0-{number:016x}", b"input") for number in range(3)]
WORKER = """
import sys, time
from pathlib import Path
from workers.memory.file_worker import FileWorker
worker = FileWorker(Path(sys.argv[1]), 1, 64)
assert worker.present(["none"]) == bytes(1)
print(worker.pid, flush=True)
time.sleep(600)
"""


def has_ended(pid: int) -> bool:
    handle = os.pidfd_open(pid)
    try:
        return bool(select.select([handle], [], [], DEADLINE_S)[0])
    finally:
        os.close(handle)


def test_rows_are_shared(tmp_path: Path) -> None:
    worker = FileWorker(tmp_path, 2, 48)
    rows = worker.memory.reshape(3, 16)
    rows[:] = np.arange(48, dtype=np.uint8).reshape(3, 16)
    expected = rows.copy()
    assert worker.write(FILES, 16) == [""] * 3
    rows[:] = 0
    assert worker.read(FILES[::-1], 16) == [""] * 3 and (rows == expected[::-1]).all()
    (problem,) = worker.read([BlockFile("0-none", b"input")], 16)
    assert "is missing, and is computed again" in problem
    assert worker.present([FILES[0].name, "0-none"]) == b"\1\0"
    worker.close()
    assert worker.pid is None


def test_it_ends_with_the_worker(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", WORKER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=module_environment()) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it has ended before
            assert has_ended(pid)


def test_a_stopped_process_is_replaced(tmp_path: Path) -> None:
    with closing(FileWorker(tmp_path, 1, 48)) as worker:
        assert worker.write(FILES, 16) == [""] * 3
        stopped = worker.pid
        assert stopped is not None and worker._connection is not None
        worker._connection.settimeout(0.5)
        os.kill(stopped, signal.SIGSTOP)
        (problem,) = worker.read(FILES[:1], 16)
        assert "did not respond" in problem and worker.pid is None
        assert not Path(f"/proc/{stopped}").exists()
        worker._paused_until = 0.0
        assert worker.read(FILES, 16) == [""] * 3


def test_a_process_that_cannot_be_started_costs_blocks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(FileWorker(tmp_path, 1, 48)) as worker:
        os.kill(worker.pid or 0, signal.SIGKILL)
        assert "has ended" in worker.read(FILES[:1], 16)[0]
        worker._paused_until = 0.0

        def refused(*_: object, **__: object) -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(file_worker, "spawn", refused)
        assert "cannot be started: [Errno 24]" in worker.read(FILES[:1], 16)[0]
        monkeypatch.undo()
        assert worker.present([FILES[0].name]) == b"\0"  # for a while it is not started again
        worker._paused_until = 0.0
        assert worker.write(FILES, 16) == [""] * 3


def test_replaced_files_are_removed_once_the_process_runs_again(tmp_path: Path) -> None:
    with closing(FileWorker(tmp_path, 1, 48)) as worker:
        assert worker.write(FILES, 16) == [""] * 3
        os.kill(worker.pid or 0, signal.SIGKILL)
        lost = [BlockFile(f"0-lost-{number}", b"input", FILES[number].name) for number in range(2)]
        assert all(worker.write(lost[:1], 16)) and all(worker.write(lost[1:], 16))
        worker._paused_until = 0.0
        assert worker.write([BlockFile(FILES[1].name, b"input")], 16) == [""]  # stored again meanwhile
        assert sorted(path.name for path in tmp_path.iterdir()) == [FILES[1].name, FILES[2].name]


def test_files_that_a_killed_process_was_writing_are_removed(tmp_path: Path) -> None:
    with closing(FileWorker(tmp_path, 1, 48)) as worker:
        killed = worker.pid
        left, other = tmp_path / f".partial-{killed}-7", tmp_path / f".partial-{killed}7-7"
        for path in (left, other):
            path.touch()
        os.kill(killed or 0, signal.SIGKILL)
        assert "has ended" in worker.read(FILES[:1], 16)[0]
        worker._paused_until = 0.0
        assert worker.write(FILES, 16) == [""] * 3 and other.exists() and not left.exists()


def test_the_end_does_not_wait_for_a_stopped_process(tmp_path: Path) -> None:
    """A thread that waits for it finds nothing."""
    worker = FileWorker(tmp_path, 1, 48)
    os.kill(worker.pid or 0, signal.SIGSTOP)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(worker.present(["name"])))
    thread.start()
    time.sleep(0.1)
    start = time.monotonic()
    worker.close()
    thread.join(DEADLINE_S)
    assert found == [b"\0"] and time.monotonic() - start < 10.0
    assert worker.present(["name"]) == b"\0" and worker.pid is None
    assert worker.read(FILES[:1], 16) == [f"the worker ends, so {FILES[0].name} is a miss"]
