"""`python -m workers.memory.file_process`: writes or reads a tier's files, started by a worker.

process <- WriteFiles, ReadFiles, FindFiles      the rows of bytes are in memory that both map
        -> FilesDone, FilesFound                 before the next message
"""

import mmap
import socket
from pathlib import Path

import msgspec
import numpy as np

from atom.shared.messages.codec import Decoder, encode
from atom.shared.utils.logger import setup_logging
from atom.shared.utils.process import read_launch
from workers.grammar.frame_socket import read_frame, write_frame
from workers.memory.block_files import BlockFile, BlockFiles

__all__ = ["FileLaunch", "FilesDone", "FilesFound", "FindFiles", "ReadFiles", "WriteFiles"]


class FileLaunch(msgspec.Struct, frozen=True):
    """What the process needs."""

    directory: str
    num_threads: int
    socket_fd: int
    memory_fd: int
    memory_bytes: int
    replaced: int = 0
    """Id of the process before this one; 0 if there was none."""


class WriteFiles(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Write the rows at the beginning of the memory to files."""

    files: list[BlockFile]
    row_bytes: int
    removed: list[str] = []
    """Names of files to be removed before."""


class ReadFiles(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Read files to rows at the beginning of the memory."""

    files: list[BlockFile]
    row_bytes: int


class FindFiles(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Which of these files are there?"""

    names: list[str]


class FilesDone(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The answer to `WriteFiles` and `ReadFiles`."""

    problems: list[str]
    """What went wrong with each file; empty if nothing did."""


class FilesFound(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The answer to `FindFiles`."""

    present: bytes
    """For each name 1 if there is such a file, else 0."""


def main() -> None:
    """Serve until the worker closes the socket."""
    launch = read_launch(FileLaunch)
    setup_logging("KV files")
    memory = np.frombuffer(mmap.mmap(launch.memory_fd, launch.memory_bytes), np.uint8)
    files = BlockFiles(Path(launch.directory), launch.num_threads)
    if launch.replaced:
        files.clean_up(launch.replaced)
    connection = socket.socket(fileno=launch.socket_fd)
    union = WriteFiles | ReadFiles | FindFiles
    decoder: Decoder[WriteFiles | ReadFiles | FindFiles] = Decoder(union)
    while frame := read_frame(connection):
        message = decoder.decode(frame)
        if isinstance(message, FindFiles):
            write_frame(connection, encode(FilesFound(files.present(message.names))))
            continue
        if isinstance(message, WriteFiles):
            files.remove(message.removed)
        rows_NS = memory[: len(message.files) * message.row_bytes].reshape(-1, message.row_bytes)
        run = files.write if isinstance(message, WriteFiles) else files.read
        write_frame(connection, encode(FilesDone(run(message.files, rows_NS))))


if __name__ == "__main__":
    main()
