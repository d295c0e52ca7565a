"""A KV tier in files, one for each block of a KV group, named after its digest.

    DIRECTORY/seed                           of digests, for all engines (`engine_core.kv_tiers.tier_seed`)
    DIRECTORY/FINGERPRINT-RANK/GROUP-DIGEST  a block (`workers.memory.block_file`)

Two processes write and read the files (`workers.memory.file_process`); the rows of bytes lie in memory that
they share with the worker.

Engines of one host may share a directory: each finds what others had stored when it started, and a file that
another one has removed is a miss. The file's times say when it was used last.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from atom.shared.messages.kv_tiers import BlockCopy
from atom.shared.utils.logger import RareWarning
from atom.shared.utils.own_directory import make_own_directory
from atom.shared.utils.sizes import size_text
from workers.memory.block_files import PARTIAL, BlockFile, is_abandoned
from workers.memory.file_worker import FileWorker
from workers.memory.pinning import pin

__all__ = ["DiskTier"]

_NAME = re.compile(r"(\d{1,4})-([0-9a-f]{16})")
_PART_BYTES = 32 << 20
"""Many blocks, which are written or read at the same time. A step's own copies wait 0.6 ms at 55 GB/s."""
_CPU = torch.device("cpu")
_END_S = 2.0
"""A process that has not ended by then is killed; a block that it was writing is lost."""


class DiskTier:
    """The files of one rank. One thread may read blocks while another one writes some."""

    part_bytes = _PART_BYTES
    is_two_way = True

    def __init__(
        self,
        directory: Path,
        num_groups: int,
        num_files: int = 1,
        most_bytes: int = 0,
        device: torch.device = _CPU,
    ):
        """`num_groups`: KV groups; `num_files`: those that are written, and read, at the same time.

        `most_bytes`: of the largest block; `device`: where the rows are.
        Raises NotOwnError or OSError for a directory that cannot be used, and MemoryError.
        """
        make_own_directory(directory.parent)
        make_own_directory(directory)
        self._directory = directory
        self._num_groups = num_groups
        self._warning = RareWarning()
        num_bytes = max(_PART_BYTES, most_bytes)
        self._reader = FileWorker(directory, num_files, num_bytes)
        self._writer = FileWorker(directory, num_files, num_bytes)
        self._read = _shared_rows(self._reader, device)
        self._to_write = _shared_rows(self._writer, device)

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
                    elif entry.name.startswith(PARTIAL) and is_abandoned(entry.path, times.st_mtime):
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
        each = [digests[start : start + 8] for start in range(0, len(digests), 8)]
        groups = range(self._num_groups)
        found = self._reader.present([_name(group, digest) for group in groups for digest in each])
        return [found[start : start + len(each)] for start in range(0, len(found), len(each))]

    def write(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
        """Write rows of bytes to files; returns the failed ones. Waits for the device."""
        size = rows_NS.shape[1]
        failed: list[int] = []
        for first, part in self._parts(copies, size):
            self._to_write[: len(part) * size].view(-1, size).copy_(rows_NS[first : first + len(part)])
            files = [
                BlockFile(
                    _name(group, copy.digest),
                    copy.hash_input,
                    _name(group, copy.replaced) if copy.replaced else "",
                )
                for copy in part
            ]
            failed += self._failed(first, self._writer.write(files, size))
        return failed

    def read(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
        """Read files to rows of bytes; returns the failed ones, which are removed if they are damaged."""
        size = rows_NS.shape[1]
        failed: list[int] = []
        for first, part in self._parts(copies, size):
            files = [BlockFile(_name(group, copy.digest), copy.hash_input) for copy in part]
            failed += self._failed(first, self._reader.read(files, size))
            rows_NS[first : first + len(part)].copy_(self._read[: len(part) * size].view(-1, size))
        return failed

    def close(self) -> None:
        """End the processes. A thread that still uses the tier finds nothing from now on."""
        deadline = time.monotonic() + _END_S
        for worker in (self._reader, self._writer):
            worker.begin_close()
        for worker in (self._reader, self._writer):
            worker.close(deadline)

    def _parts(self, copies: Sequence[BlockCopy], size: int) -> Iterator[tuple[int, Sequence[BlockCopy]]]:
        """Index of the first one, and as many of `size` bytes as the processes take at a time."""
        most = len(self._read) // size
        for first in range(0, len(copies), most):
            yield first, copies[first : first + most]

    def _failed(self, first: int, problems: Sequence[str]) -> list[int]:
        for problem in filter(None, problems):
            self._warning.log(problem)
        return [first + index for index, problem in enumerate(problems) if problem]


def _name(group: int, digest: bytes) -> str:
    return f"{group}-{digest.hex()}"


def _shared_rows(worker: FileWorker, device: torch.device) -> torch.Tensor:
    """The memory of a process, pinned for a GPU. Raises MemoryError if it cannot be."""
    memory = torch.from_numpy(worker.memory)
    if device.type == "cuda" and (status := pin(memory, worker)):
        raise MemoryError(
            f"--kv-offload-dir: {size_text(len(memory))} of host memory for copies cannot be pinned (error "
            f"{status}): raise the limits of this host or container (memory, ulimit -l), or omit the flag"
        )
    return memory
