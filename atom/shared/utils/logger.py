"""One log format for all processes, on standard error, which no process waits for.

A pipe, a terminal or journald's socket takes no more bytes while its reader stands still: a terminal after
Ctrl-S, a pager, a blocking log driver. A supervisor that waited for it could not restart an engine, and a
frontend would send no token. A file on a full disk takes none either, and a pipe without a reader.
So lines that are not taken in time are lost, and the next line says how many.
"""

import contextlib
import logging
import os
import select
import socket
import stat
import sys
import time
from typing import TextIO

_RARE_S = 60.0
_BRIEF = "%(asctime)s %(levelname).1s %(process_label)s] %(message)s"
_VERBOSE = (
    "%(asctime)s %(levelname)s %(process_label)s pid=%(process)d "
    "%(pathname)s:%(lineno)d %(funcName)s] %(message)s"
)

_description_level = logging.INFO
_MAX_WAIT_MS = 20
"""A reader that has kept up so far may take so long; one that has not is not waited for."""


class LogStream:
    """An open file as a text stream whose `write` waits at most `_MAX_WAIT_MS` for a reader."""

    def __init__(self, fd: int):
        """`fd` stays as it is for others who share it. Raises OSError for another user's terminal."""
        self._socket = None
        self._may_block = False
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(fd))
            self._fd = self._socket.fileno()
        elif not (stat.S_ISFIFO(mode) or os.isatty(fd)):  # writing to a disk waits for no reader
            self._fd = os.dup(fd)
        else:
            try:
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self._fd = os.open(f"/proc/self/fd/{fd}", flags)
            except OSError:  # it is another user's, as the pipe of a container without root
                if not stat.S_ISFIFO(mode):
                    raise
                self._fd = os.dup(fd)
                self._may_block = True
        self._poller = select.poll()
        self._poller.register(self._fd, select.POLLOUT)
        self._num_lost = 0
        self._why_lost = ""
        """The cause of the last loss."""
        self._is_in_line = False

    def write(self, text: str) -> None:
        """Write one line, or a part of it, or nothing."""
        wait_ms = 0 if self._num_lost else _MAX_WAIT_MS
        start = "\n" * self._is_in_line
        if self._num_lost:
            start += f"{self._num_lost} lines were lost: standard error {self._why_lost}\n"
        left = (start + text).encode(errors="backslashreplace")
        while left:
            try:
                written = self._written(left)
            except OSError as error:
                self._lose(f"could not be written: {error.strerror}")
                return
            if written:
                left = left[written:]
                self._is_in_line = bool(left)
            elif not self._poller.poll(wait_ms):
                self._lose("was not read in time")
                return
        self._num_lost = 0

    def _lose(self, why: str) -> None:
        self._num_lost += 1
        self._why_lost = why

    def flush(self) -> None:
        """Does nothing: no text is buffered."""

    def close(self) -> None:
        """Close this file, and not the one that it was made of."""
        if self._socket is not None:
            self._socket.close()
        else:
            os.close(self._fd)

    def _written(self, content: bytes) -> int:
        """How many bytes of it were written."""
        try:
            if self._socket is not None:
                return self._socket.send(content, socket.MSG_DONTWAIT)
            if self._may_block:  # so much fits in a pipe where anything does
                return os.write(self._fd, content[: select.PIPE_BUF]) if self._poller.poll(0) else 0
            return os.write(self._fd, content)
        except BlockingIOError:
            return 0


def _standard_error() -> TextIO | LogStream:
    try:
        return LogStream(sys.stderr.fileno())
    except OSError:  # it is closed, replaced by an object without a file, or the terminal of another user
        return sys.stderr


def print_lines(text: str) -> None:
    """Print text to standard error as log lines are: lost where it takes none."""
    stream = next((each.stream for each in _stream_handlers()), sys.stderr)
    with contextlib.suppress(OSError):
        stream.write(text + "\n")
        stream.flush()


def _stream_handlers() -> "list[logging.StreamHandler[TextIO | LogStream]]":
    return [each for each in get_logger().handlers if isinstance(each, logging.StreamHandler)]


def setup_logging(process_label: str, level: str = "info", describes: bool = True) -> logging.Logger:
    """Configure and return the root of ATOM's loggers, from `level` on (debug, info, warning or error).

    ATOM_LOG_MORE=1 adds process id, file and line. Without `describes` what `describe` logs is for debugging.
    """
    global _description_level
    from atom.shared.utils import envs

    handler = logging.StreamHandler(_standard_error())
    handler.setFormatter(
        logging.Formatter(
            _VERBOSE if envs.ATOM_LOG_MORE else _BRIEF,
            datefmt="%H:%M:%S",
            defaults={"process_label": process_label},
        )
    )
    logger = logging.getLogger("atom")
    for earlier in _stream_handlers():
        if isinstance(earlier.stream, LogStream):
            earlier.stream.close()
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    _description_level = logging.INFO if describes else logging.DEBUG
    return logger


def set_log_level(level: str) -> None:
    """Log from this level on: debug, info, warning or error."""
    get_logger().setLevel(level.upper())


def get_logger() -> logging.Logger:
    """The logger that `setup_logging` configured."""
    return logging.getLogger("atom")


def describe(text: str, *args: object) -> None:
    """Log what this process has, which is the same in equal engines and in each of their lives."""
    get_logger().log(_description_level, text, *args, stacklevel=2)


class RareWarning:
    """Logs the first warning of a minute, and how many came after it with the next one."""

    def __init__(self) -> None:
        self._logged_at = -_RARE_S
        self._num_silent = 0

    def log(self, text: str) -> None:
        """`text` is one line."""
        if time.monotonic() - self._logged_at < _RARE_S:
            self._num_silent += 1
            return
        self._logged_at = time.monotonic()
        more = f" ({self._num_silent} more before this line)" if self._num_silent else ""
        self._num_silent = 0
        get_logger().warning("%s%s", text, more)
