"""A process that writes or reads files (`workers.memory.file_process`), from the worker's side."""

import contextlib
import mmap
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atom.shared.messages.codec import Decoder, WireError, encode
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
_END_S = 5.0
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
        self._decoder: Decoder[_Answer] = Decoder(_Answer)
        self._paused_until = 0.0
        self._start()

    @property
    def pid(self) -> int | None:
        """Its process id; None while it does not run."""
        return None if self._process is None else self._process.pid

    def write(self, files: Sequence[BlockFile], row_bytes: int) -> list[str]:
        """Write the first rows of the memory; returns for each what went wrong, or an empty text."""
        return self._run(WriteFiles(list(files), row_bytes), files)

    def read(self, files: Sequence[BlockFile], row_bytes: int) -> list[str]:
        """Read to the first rows of the memory; returns for each what went wrong, or an empty text."""
        return self._run(ReadFiles(list(files), row_bytes), files)

    def present(self, names: Sequence[str]) -> bytes:
        """For each name 1 if there is such a file, else 0; none is found while the process does not run."""
        answer = self._ask(FindFiles(list(names)))
        return answer.present if isinstance(answer, FilesFound) else bytes(len(names))

    def close(self) -> None:
        """End the process. Nothing else is called after this."""
        self._end()
        os.close(self._memory_fd)

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            assert self._process.stdin is not None
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process = self._connection = None

    def _run(self, request: WriteFiles | ReadFiles, files: Sequence[BlockFile]) -> list[str]:
        answer = self._ask(request)
        if isinstance(answer, FilesDone):
            return answer.problems
        return [f"the process for files of KV blocks has ended, so {file.name} is a miss" for file in files]

    def _ask(self, request: _Request) -> _Answer | None:
        """The answer; None if the process has ended."""
        if self._connection is None:
            if time.monotonic() < self._paused_until:
                return None
            self._start()
        assert self._connection is not None
        try:
            write_frame(self._connection, encode(request))
            if frame := read_frame(self._connection):
                return self._decoder.decode(frame)
        except (OSError, WireError):
            pass
        self._paused_until = time.monotonic() + _PAUSE_S
        if self._process is not None:
            self._process.kill()
        self._end()
        return None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = theirs.fileno(), self._memory_fd
            launch = FileLaunch(str(self._directory), self._num_threads, *descriptors, len(self.memory))
            self._process = spawn(_MODULE, launch, pass_fds=descriptors)
        self._connection = ours
