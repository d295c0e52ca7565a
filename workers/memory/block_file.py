"""The file of one block: a header, the hash input of the block, its bytes. A remote store has the same.

    8 bytes   mark of the format
    8 bytes   xxh3-64 of all that follows
    4 bytes   length of the hash input, little-endian
    ...       the hash input: digest of the block before it, and its token ids
    ...       the bytes that all layers cache, on one rank

A file is complete from the moment at which it has its name.
"""

import contextlib
import fcntl
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from atom.shared.utils.own_directory import is_own_file

__all__ = ["HEADER_BYTES", "DamagedBlockError", "block_header", "check_block", "read_block", "write_block"]

_MARK = b"ATOMKV01"
_LENGTH_BYTES = 4
HEADER_BYTES = len(_MARK) + 8 + _LENGTH_BYTES


class DamagedBlockError(ValueError):
    """What was read is not what was written for this block."""


def block_header(hash_input: bytes, content: memoryview) -> bytes:
    """What comes before the bytes of a block."""
    length = len(hash_input).to_bytes(_LENGTH_BYTES, "little")
    checksum = xxh3_64(length + hash_input)
    checksum.update(content)
    return _MARK + checksum.digest() + length + hash_input


def check_block(header: bytes | memoryview, hash_input: bytes, content: memoryview) -> None:
    """Raises DamagedBlockError unless `block_header` made this header of the same."""
    length = len(hash_input).to_bytes(_LENGTH_BYTES, "little")
    checksum = xxh3_64(header[len(_MARK) + 8 :])
    checksum.update(content)
    if header[: len(_MARK)] != _MARK or header[len(_MARK) : len(_MARK) + 8] != checksum.digest():
        raise DamagedBlockError("its checksum is wrong")
    if header[len(_MARK) + 8 :] != length + hash_input:
        raise DamagedBlockError("it has a block of other tokens")


def write_block(path: Path, temporary: Path, hash_input: bytes, row_S: NDArray[np.uint8]) -> None:
    """Write a file, or none. Raises OSError, such as for a full disk.

    The temporary file is locked, where its file system can do so, as long as this process writes it.
    """
    content = np.ascontiguousarray(row_S).data
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for part in (block_header(hash_input, content), content):
                _write_all(file.fileno(), memoryview(part))
            temporary.rename(path)  # before it is unlocked
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_block(path: Path, hash_input: bytes, row_S: NDArray[np.uint8]) -> None:
    """Read the bytes of a block.

    Raises FileNotFoundError, OSError, or DamagedBlockError for a file that is not this block's.
    """
    # A pipe in its place must not be waited for.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:  # not os.fdopen, which leaves the handle of a directory open
        found = os.fstat(handle)
        if not is_own_file(found):
            raise DamagedBlockError("it belongs to another user, or others may use it")
        expected = HEADER_BYTES + len(hash_input) + len(row_S)
        if found.st_size != expected:
            raise DamagedBlockError(f"it has {found.st_size} bytes, not {expected}")
        header = _read_all(handle, memoryview(bytearray(HEADER_BYTES + len(hash_input))))
        content = _read_all(handle, row_S.data)
    finally:
        os.close(handle)
    check_block(header, hash_input, content)


def _write_all(handle: int, content: memoryview) -> None:
    while content:
        content = content[os.write(handle, content) :]


def _read_all(handle: int, content: memoryview) -> memoryview:
    left = content
    while left:
        count = os.readv(handle, [left])
        if not count:
            raise DamagedBlockError("it ended early")
        left = left[count:]
    return content
