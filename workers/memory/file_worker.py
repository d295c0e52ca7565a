"""A process that writes or reads files (`workers.memory.file_process`), from the worker's side."""

import contextlib
import mmap
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atom.shared.messages.codec import Decoder, WireError, encode
from atom.shared.utils.errors import one_line
from atom.shared.utils.process import spawn
from workers.grammar.frame_socket import read_frame, write_frame
from workers.memory.block_files import BlockFile
from workers.memory.file_process import (
    FileLaunch,
    FilesDone,
    FilesFound,
    FindFiles,
    ReadFiles,
    WriteFiles,
)

__all__ = ["FileWorker"]

_MODULE = "workers.memory.file_process"
_PAUSE_S = 10.0
"""After the process has ended it is not started again for so long: what it would do has failed."""
_ANSWER_S = 30.0
"""A disk that takes longer for one request hangs, or the process does: it holds blocks of the cache."""
_MOST_UNREMOVED = 1 << 16
"""More than a GPU computes in a pause. A later start removes those that are not noted."""
_END_S = 2.0
_KILL_S = 1.0
_Request = WriteFiles | ReadFiles | FindFiles
_Answer = FilesDone | FilesFound


class FileWorker:
    """The process, and the memory that both map. One thread calls it, and waits without the interpreter."""

    def __init__(self, directory: Path, num_threads: int, num_bytes: int):
        """`num_threads`: files at the same time; `num_bytes`: of the memory, for the rows of one call.

        Raises OSError if the process cannot be started.
        """
        self._directory = directory
        self._num_threads = num_threads
        self._memory_fd = os.memfd_create("atom-kv-files", os.MFD_CLOEXEC)
        os.ftruncate(self._memory_fd, num_bytes)
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self._memory_fd, num_bytes), np.uint8)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        """For what starts and ends the process: `close` may come in the middle of a call."""
        self._is_closed = False
        self._unremoved: dict[str, None] = {}
        """Replaced files that may still be there, since the process did not run."""
        self._problem = ""
        """Why the process did not run last."""
        self._decoder: Decoder[_Answer] = Decoder(_Answer)
        self._paused_until = 0.0
        self._start()

    @property
    def pid(self) -> int | None:
        """Its process id; None while it does not run."""
        return None if self._connection is None or self._process is None else self._process.pid

    def write(self, files: Sequence[BlockFile], row_bytes: int) -> list[str]:
        """Write the first rows of the memory; returns for each what went wrong, or an empty text."""
        # A file may be written again: it is removed before.
        problems = self._run(WriteFiles(list(files), row_bytes, list(self._unremoved)), files)
        if self._connection is None:
            replaced = [file.replaced for file in files if file.replaced]
            self._unremoved |= dict.fromkeys(replaced[: _MOST_UNREMOVED - len(self._unremoved)])
        else:
            self._unremoved.clear()
        return problems

    def read(self, files: Sequence[BlockFile], row_bytes: int) -> list[str]:
        """Read to the first rows of the memory; returns for each what went wrong, or an empty text."""
        return self._run(ReadFiles(list(files), row_bytes), files)

    def present(self, names: Sequence[str]) -> bytes:
        """For each name 1 if there is such a file, else 0; none is found while the process does not run."""
        answer = self._ask(FindFiles(list(names)))
        return answer.present if isinstance(answer, FilesFound) else bytes(len(names))

    def begin_close(self) -> None:
        """Tell the process to end. A call in another thread returns, and later ones find nothing."""
        self._is_closed = True
        with self._lock:
            self._problem = "the worker ends"
            if self._connection is not None:
                with contextlib.suppress(OSError):  # the process has ended
                    self._connection.shutdown(socket.SHUT_RDWR)

    def close(self, deadline: float | None = None) -> None:
        """End the process, by SIGKILL at `deadline`, a time.monotonic(). No other call comes after this."""
        self.begin_close()
        with self._lock:
            self._end(time.monotonic() + _END_S if deadline is None else deadline)
            os.close(self._memory_fd)

    def _end(self, deadline: float = 0.0) -> None:
        """Close the socket, and wait for the process until it is killed at `deadline`."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        if self._process.poll() is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it ends once its disk responds
                self._process.wait(_KILL_S)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _run(self, request: WriteFiles | ReadFiles, files: Sequence[BlockFile]) -> list[str]:
        answer = self._ask(request)
        if isinstance(answer, FilesDone):
            return answer.problems
        return [f"{self._problem}, so {file.name} is a miss" for file in files]

    def _ask(self, request: _Request) -> _Answer | None:
        """The answer; None if the process has ended, or does not respond: it is killed then."""
        connection = self._connected()
        if connection is None:
            return None
        problem = "the process for files of KV blocks has ended"
        try:
            write_frame(connection, encode(request))
            if frame := read_frame(connection):
                return self._decoder.decode(frame)
        except TimeoutError:
            problem = (
                f"the process for files of KV blocks did not respond within {_ANSWER_S:.0f} s, and is killed"
            )
        except (OSError, WireError):
            pass
        with self._lock:
            if not self._is_closed:
                self._fail(problem)
                self._end()
        return None

    def _connected(self) -> socket.socket | None:
        """The socket of a process that runs; None if there is none, and it is too early for another one."""
        with self._lock:
            # One that was killed may write to the memory until it has ended.
            may_start = self._process is None or self._process.poll() is not None
            is_due = time.monotonic() >= self._paused_until
            if self._connection is None and may_start and is_due and not self._is_closed:
                try:
                    self._start()
                except OSError as error:
                    self._fail(
                        f"the process for files of KV blocks cannot be started: {one_line(error, OSError)}"
                    )
            return None if self._is_closed else self._connection

    def _fail(self, problem: str) -> None:
        self._problem = problem
        self._paused_until = time.monotonic() + _PAUSE_S

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = theirs.fileno(), self._memory_fd
            former = 0 if self._process is None else self._process.pid
            size = len(self.memory)
            launch = FileLaunch(str(self._directory), self._num_threads, *descriptors, size, former)
            try:
                self._process = spawn(_MODULE, launch, pass_fds=descriptors)
            except OSError:
                ours.close()
                raise
        ours.settimeout(_ANSWER_S)
        self._connection = ours
