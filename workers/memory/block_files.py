"""The files of one rank's blocks: written, read and looked for, several at the same time. Without torch.

Runs in a process of its own (`workers.memory.file_process`): each file takes several calls of the system, and
a thread that makes them in the worker would take the interpreter from the thread that launches steps.
"""

import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from atom.shared.utils.errors import one_line
from workers.memory.block_file import DamagedBlockError, read_block, write_block

__all__ = ["PARTIAL", "BlockFile", "BlockFiles", "is_abandoned"]

PARTIAL = ".partial-"
"""How the names of files begin that are not complete."""
_STALE_S = 600.0
"""Where files cannot be locked, a partial one of this age is of a process that has ended."""
_Row = NDArray[np.uint8]


class BlockFile(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A file to be written or read."""

    name: str
    hash_input: bytes
    replaced: str = ""
    """Name of the file to be removed before it is written; empty if there is none."""


class BlockFiles:
    """The files in one directory. Each call returns for each file what went wrong, or an empty text."""

    def __init__(self, directory: Path, num_threads: int = 1):
        """`num_threads`: files that are written or read at the same time."""
        self._directory = directory
        self._numbers = itertools.count()
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "kv-files") if num_threads > 1 else None

    def write(self, files: Sequence[BlockFile], rows_NS: _Row) -> list[str]:
        """Write rows of bytes to files, unless there are such files."""
        return self._each(self._write, files, rows_NS)

    def read(self, files: Sequence[BlockFile], rows_NS: _Row) -> list[str]:
        """Read files to rows of bytes. A damaged one is removed."""
        return self._each(self._read, files, rows_NS)

    def remove(self, names: Sequence[str]) -> None:
        """Remove those files that are there."""
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._directory}/{name}")

    def clean_up(self, pid: int) -> None:
        """Remove the files that a process has left incomplete."""
        with contextlib.suppress(OSError):
            for path in self._directory.glob(f"{PARTIAL}{pid}-*"):
                if is_abandoned(str(path), path.stat().st_mtime):
                    path.unlink(missing_ok=True)

    def present(self, names: Sequence[str]) -> bytes:
        """For each name 1 if there is such a file, else 0."""
        return bytes(os.path.exists(f"{self._directory}/{name}") for name in names)

    def _each(
        self, run: Callable[[BlockFile, _Row], str], files: Sequence[BlockFile], rows_NS: _Row
    ) -> list[str]:
        """`run` for each file and its row, every thread one share of them."""
        if self._threads is None or len(files) < 2:
            return list(map(run, files, rows_NS))
        problems = [""] * len(files)

        def run_share(first: int) -> None:
            for index in range(first, len(files), self._num_threads):
                problems[index] = run(files[index], rows_NS[index])

        list(self._threads.map(run_share, range(min(self._num_threads, len(files)))))
        return problems

    def _write(self, file: BlockFile, row_S: _Row) -> str:
        path = self._directory / file.name
        try:
            if file.replaced:
                (self._directory / file.replaced).unlink(missing_ok=True)
            try:
                os.utime(path)  # another engine has stored the same block
            except FileNotFoundError:
                temporary = self._directory / f"{PARTIAL}{os.getpid()}-{next(self._numbers)}"
                write_block(path, temporary, file.hash_input, row_S)
        except OSError as error:
            return f"a KV block cannot be written: {one_line(error, OSError)}"
        return ""

    def _read(self, file: BlockFile, row_S: _Row) -> str:
        path = self._directory / file.name
        try:
            read_block(path, file.hash_input, row_S)
            with contextlib.suppress(
                OSError
            ):  # removed by another engine just now, or nothing may be written
                os.utime(path)
        except FileNotFoundError:
            return f"a KV block is missing, and is computed again: {path}"
        except DamagedBlockError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            return f"a KV block is damaged, and is computed again: {path}: {error}"
        except OSError as error:
            return f"a KV block cannot be read, and is computed again: {one_line(error, OSError)}"
        return ""


def is_abandoned(partial: str, written_at: float) -> bool:
    """Whether the process that wrote a file has ended, and so does not lock it any more.

    One that has made it just now, and is about to lock it, loses this block alone.
    """
    handle = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # its file system has no locks
        return time.time() - written_at > _STALE_S
    finally:
        os.close(handle)
    return True
