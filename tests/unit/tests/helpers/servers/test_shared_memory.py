"""Only files of a test's own processes are called left behind."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.servers.shared_memory import SharedMemoryWatch

# Maps the file, says so, and ends at the end of its input, with or without removing the file.
USE = """
import mmap, os, sys
path, removes = sys.argv[1], sys.argv[2] == "removes"
with open(path, "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
sys.stdin.read()
if removes:
    os.unlink(path)
"""


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path("/dev/shm", f"test-{uuid.uuid4()}")
    yield path
    path.unlink(missing_ok=True)


def use(path: Path, end: str) -> "subprocess.Popen[bytes]":
    child = subprocess.Popen(
        [sys.executable, "-c", USE, str(path), end], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"mapped\n"
    return child


@pytest.mark.parametrize(("end", "left"), [("leaves", True), ("removes", False)])
def test_a_childs_file_is_found(path: Path, end: str, left: bool) -> None:
    watch = SharedMemoryWatch()
    child = use(path, end)
    while path.name not in watch._seen:
        assert not watch._ended.wait(0.05)
    child.communicate(timeout=30)
    assert watch.end() == ({path.name} if left else set())


def test_another_programs_file_is_not(path: Path) -> None:
    """One that no child of this process has used, as this process is none."""
    watch = SharedMemoryWatch()
    path.write_bytes(b"theirs")
    assert path.name in os.listdir("/dev/shm") and watch.end() == set()


def test_a_file_in_use_is_not_left(path: Path) -> None:
    watch = SharedMemoryWatch()
    child = use(path, "leaves")
    while path.name not in watch._seen:
        assert not watch._ended.wait(0.05)
    assert watch.end() == set()
    child.communicate(timeout=30)
