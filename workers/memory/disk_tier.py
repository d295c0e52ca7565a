"""A KV tier in files, one for each block of a KV group, named after its digest.

    DIRECTORY/seed                           of digests, for all engines (`engine_core.kv_tiers.tier_seed`)
    DIRECTORY/FINGERPRINT-RANK/GROUP-DIGEST  a block (`workers.memory.block_file`)

Engines of one host may share a directory: each finds what others had stored when it started, and a file that
another one has removed is a miss. The file's times say when it was used last.
"""

import contextlib
import fcntl
import itertools
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.messages.kv_tiers import BlockCopy
from atom.shared.utils.errors import one_line
from atom.shared.utils.logger import RareWarning
from atom.shared.utils.own_directory import make_own_directory
from workers.memory.block_file import DamagedBlockError, read_block, write_block

__all__ = ["DiskTier"]

_NAME = re.compile(r"(\d{1,4})-([0-9a-f]{16})")
_PARTIAL = ".partial-"
_STALE_S = 600.0
"""Where files cannot be locked, a partial one of this age is of a process that has ended."""


class DiskTier:
    """The files of one rank. Only the thread of the tier reads and writes blocks."""

    part_bytes = 128 << 20
    """Many blocks, which are read at the same time."""

    def __init__(self, directory: Path, num_groups: int, num_readers: int = 1):
        """`num_groups`: KV groups; `num_readers`: files that are read at the same time.

        Raises NotOwnError or OSError for a directory that cannot be used.
        """
        make_own_directory(directory.parent)
        make_own_directory(directory)
        self._directory = directory
        self._num_groups = num_groups
        self._numbers = itertools.count()
        self._readers = ThreadPoolExecutor(num_readers, "kv-tier-reader") if num_readers > 1 else None
        self._warning = RareWarning()

    def stored(self, num_slots: Sequence[int]) -> list[bytes]:
        """Digests of the blocks of each KV group, packed, least recently used first.

        Removes what is more than `num_slots`, by group, and partial files of processes that have ended.
        """
        found: list[list[tuple[int, bytes, str]]] = [[] for _ in num_slots]
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another engine has removed it
                    times = entry.stat(follow_symlinks=False)
                    name = _NAME.fullmatch(entry.name)
                    if name is not None and int(name[1]) < len(found):
                        digest = bytes.fromhex(name[2])
                        found[int(name[1])].append((times.st_mtime_ns, digest, entry.path))
                    elif entry.name.startswith(_PARTIAL) and _is_abandoned(entry.path, times.st_mtime):
                        os.unlink(entry.path)
        digests = []
        for blocks, count in zip(found, num_slots, strict=True):
            blocks.sort()
            for _, _, path in blocks[: max(len(blocks) - count, 0)]:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            digests.append(b"".join(digest for _, digest, _ in blocks[max(len(blocks) - count, 0) :]))
        return digests

    def present(self, digests: bytes) -> list[bytes]:
        """For each KV group and each digest of 8 bytes: 1 if there is a file, else 0."""
        names = [digests[start : start + 8].hex() for start in range(0, len(digests), 8)]
        prefixes = [f"{self._directory}/{group}-" for group in range(self._num_groups)]
        return [bytes(os.path.exists(prefix + name) for name in names) for prefix in prefixes]

    def write(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
        """Write rows of bytes to files; returns the failed ones. Waits for the device."""
        failed = []
        for index, (copy, row_S) in enumerate(zip(copies, rows_NS.cpu().numpy(), strict=True)):
            try:
                if copy.replaced:
                    self._path(group, copy.replaced).unlink(missing_ok=True)
                self._write(self._path(group, copy.digest), copy.hash_input, row_S)
            except OSError as error:
                failed.append(index)
                self._warning.log(f"a KV block cannot be written: {one_line(error, OSError)}")
        return failed

    def read(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
        """Read files to rows of bytes; returns the failed ones, which are removed if they are damaged."""
        found = torch.empty(rows_NS.shape, dtype=torch.uint8, pin_memory=rows_NS.is_cuda)
        paths = [self._path(group, copy.digest) for copy in copies]
        inputs = [copy.hash_input for copy in copies]
        # Reading and summing up release the GIL.
        run = map if self._readers is None else self._readers.map
        problems = list(run(_read, paths, inputs, found.numpy()))
        for problem in filter(None, problems):
            self._warning.log(problem)
        rows_NS.copy_(found)
        return [index for index, problem in enumerate(problems) if problem]

    def _write(self, path: Path, hash_input: bytes, row_S: NDArray[np.uint8]) -> None:
        """Write a file unless there is one: another engine has stored the same block."""
        try:
            os.utime(path)
        except FileNotFoundError:
            temporary = self._directory / f"{_PARTIAL}{os.getpid()}-{next(self._numbers)}"
            write_block(path, temporary, hash_input, row_S)

    def _path(self, group: int, digest: bytes) -> Path:
        return self._directory / f"{group}-{digest.hex()}"


def _is_abandoned(partial: str, written_at: float) -> bool:
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


def _read(path: Path, hash_input: bytes, row_S: NDArray[np.uint8]) -> str:
    """Read a block, and remove its file if it is damaged; returns what is wrong, or nothing."""
    try:
        read_block(path, hash_input, row_S)
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
