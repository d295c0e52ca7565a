"""A process never waits for the reader of its log."""

import contextlib
import os
import pty
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

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
from atom.shared.utils.logger import setup_logging
logger = setup_logging("test")
for number in range(5000):
    logger.info("line %d of many that are long enough to fill the pipe", number)
print("done")
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "done\n"
        assert "line 0 of many" in process.stderr.readline()
        process.stderr.read()
