"""A process never waits for the reader of its log."""

import contextlib
import errno
import os
import pty
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atom.shared.utils.logger import LogStream

_LINE = "x" * 99 + "\n"


def _pipe() -> tuple[int, int]:
    return os.pipe()


def _terminal() -> tuple[int, int]:
    return pty.openpty()


def _socket() -> tuple[int, int]:
    reader, writer = socket.socketpair()
    return reader.detach(), writer.detach()


@pytest.fixture(params=[_pipe, _terminal, _socket])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """What reads, and what is written to."""
    make: Callable[[], tuple[int, int]] = request.param
    found = make()
    yield found
    for fd in found:
        os.close(fd)


def _read(fd: int) -> str:
    """All that is there."""
    os.set_blocking(fd, False)
    found = b""
    with contextlib.suppress(BlockingIOError):
        while more := os.read(fd, 1 << 16):
            found += more
    return found.decode().replace("\r\n", "\n")


def test_lines_that_are_not_read_are_lost_and_counted(ends: tuple[int, int]) -> None:
    _check_lost_lines(*ends)


def test_the_pipe_of_another_user_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    ends = os.pipe()
    _check_lost_lines(*ends)
    for fd in ends:
        os.close(fd)


def _check_lost_lines(reader: int, writer: int) -> None:
    stream = LogStream(writer)
    begun = time.monotonic()
    for _ in range(20_000):
        stream.write(_LINE)
    assert time.monotonic() - begun < 60
    whole = _read(reader).count(_LINE)
    stream.write("the reader is back\n")
    *_, lost, last = _read(reader).splitlines()
    assert (lost, last) == (
        f"{20_000 - whole} lines were lost: standard error was not read in time",
        "the reader is back",
    )
    stream.write("and has missed nothing since\n")
    assert _read(reader) == "and has missed nothing since\n"
    assert os.get_blocking(writer)  # other programs share it
    stream.close()


def test_a_process_with_a_full_pipe_goes_on() -> None:
    code = """
from atom.shared.utils.logger import print_lines, setup_logging
logger = setup_logging("test")
for number in range(5000):
    logger.info("line %d of many that are long enough to fill the pipe", number)
print_lines("a banner")
print("done")
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "done\n"
        assert "line 0 of many" in process.stderr.readline()
        process.stderr.read()


def test_equal_engines_describe_themselves_for_debugging_alone() -> None:
    code = """
import sys
from atom.shared.utils.logger import describe, setup_logging
for level in ("info", "debug"):
    for describes in (True, False):
        setup_logging(f"{level} {describes}", level, describes)
        describe("has %d layers", 3)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    lines = [line.split(" ", 1)[1] for line in found.stderr.splitlines()]
    assert lines == [
        "I info True] has 3 layers",
        "I debug True] has 3 layers",
        "D debug False] has 3 layers",
    ]


def test_lines_that_a_full_disk_takes_not_are_lost_and_change_no_exit_status() -> None:
    code = """
from atom.shared.utils.logger import print_lines, setup_logging
print_lines("before the log is set up")
logger = setup_logging("test")
logger.info("a line")
print_lines("a banner")
print("done")
"""
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True, timeout=60
        )
    assert (found.stdout, found.returncode) == ("done\n", 0)


def test_a_log_goes_on_in_its_file_once_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "log"
    file.write_text("earlier\n")
    is_full = [False, True, True, False]
    write = os.write

    def written(fd: int, content: bytes) -> int:
        if is_full.pop(0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, content)

    with open(file, "a") as opened:
        stream = LogStream(opened.fileno())
        monkeypatch.setattr(os, "write", written)
        for number in range(4):
            stream.write(f"line {number}\n")
        monkeypatch.undo()
        stream.close()
    lost = "2 lines were lost: standard error could not be written: No space left on device"
    assert file.read_text().splitlines() == ["earlier", "line 0", lost, "line 3"]
