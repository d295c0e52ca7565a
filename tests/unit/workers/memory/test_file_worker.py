"""A process for files: it shares rows with the worker, and ends with it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from atom.shared.utils.process import module_environment
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
