"""Compilers and what they start end with the process that started them, and leave no files."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atom_ops.native_impl import compilers
from tests.helpers.servers.server import is_alive

DEADLINE_S = 60.0

# As g++ does: a temporary file, and a process of its own that does the work.
COMPILER = """#!/bin/sh
touch {pids}/$$ "$TMPDIR/cc1.s"
sh -c 'touch {pids}/$$; sleep 300; true'
"""
BUILD = """
import signal, sys, tempfile
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from atom_ops.native_impl import compilers
with tempfile.TemporaryDirectory(dir=sys.argv[2]) as scratch:
    compilers.run([[sys.argv[1]], [sys.argv[1]]], Path(scratch), 200, 200)
"""


def waited(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_build_that_is_interrupted_leaves_no_process_and_no_file(tmp_path: Path, number: int) -> None:
    pids, place, compiler = tmp_path / "pids", tmp_path / "cache", tmp_path / "compiler"
    pids.mkdir()
    place.mkdir()
    compiler.write_text(COMPILER.format(pids=pids))
    compiler.chmod(0o755)
    building = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(compiler), str(place)], stderr=subprocess.DEVNULL
    )
    try:
        waited(lambda: len(list(pids.iterdir())) == 4, "two compilers of two processes have not begun")
        running = [int(path.name) for path in pids.iterdir()]
        assert all(map(is_alive, running)) and list(place.iterdir())
        building.send_signal(number)
        building.wait(DEADLINE_S)
        waited(lambda: not any(map(is_alive, running)), "compilers go on")
        waited(lambda: not list(place.iterdir()), "temporary files are left")
    finally:
        building.kill()
        building.wait()


def test_one_that_fails_ends_the_others(tmp_path: Path) -> None:
    begun = time.monotonic()
    failing = ["sh", "-c", "echo 'x.cpp:1: error: no' >&2; exit 3"]
    with pytest.raises(compilers.CompilerError, match="sh cannot compile the kernels: x.cpp:1: error: no"):
        compilers.run([failing, ["sh", "-c", "sleep 300; true"]], tmp_path / "scratch", 200, 200)
    assert time.monotonic() - begun < DEADLINE_S


def test_success_leaves_the_scratch_directory_and_no_watcher(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    made = tmp_path / "scratch" / "a.o"
    compilers.run([["sh", "-c", f"echo $TMPDIR > {made}"]], tmp_path / "scratch", 60, 60)
    assert made.read_text() == f"{tmp_path / 'scratch'}\n"
    assert os.listdir(tmp_path / "scratch") == ["a.o"]


def test_a_compiler_that_never_ends_is_told_by_its_processor_time(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    looping = ["sh", "-c", "while :; do :; done"]
    with pytest.raises(compilers.CompilerError, match="sh cannot compile the kernels"):
        compilers.run([looping], tmp_path / "scratch", 200, 1)


def test_waiting_uses_no_processor_time(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    compilers.run([["sh", "-c", "sleep 2; true"]], tmp_path / "scratch", 200, 1)
