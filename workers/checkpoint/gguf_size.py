"""Whether a GGUF file is as long as its header says, which needs neither torch nor the tensors.

    magic  version  tensor count  metadata count
    metadata: key, type, value: a number, a string (length, bytes), or an array (type, count, values)
    tensors: name, number of dimensions, dimensions, type, offset from the beginning of the data
    data, aligned

Only little-endian files of version 2 and 3 are examined. The gguf package reads the others, or refuses them.
"""

import mmap
import struct
from pathlib import Path

__all__ = ["check_gguf_size"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_U32 = 4
_STRING = 8
_ARRAY = 9
_NUMBER_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value of each type that is a number."""
_ALIGNMENT = b"general.alignment"
_DEFAULT_ALIGNMENT = 32
_MAX_HEADER_BYTES = 1 << 28
_MAX_DIMENSIONS = 4
_MAX_NESTED = 4


class _CutError(Exception):
    """The file is shorter than its argument, in bytes."""


class _UnreadableError(Exception):
    """The header is not what is described above: other checks tell more."""


def check_gguf_size(path: Path) -> None:
    """Raise ValueError with both sizes, in bytes, for a file that is shorter than its header says."""
    found = path.stat().st_size
    if found == 0:
        raise ValueError(f"{path} is empty: fetch it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            needed = _Header(data).needed_bytes()
        except _UnreadableError:
            return
        except _CutError as error:
            raise ValueError(
                f"{path} is truncated: its header alone needs at least {error.args[0]:,} bytes, and the file "
                f"has {found:,}: fetch it again"
            ) from None
    if needed > found:
        raise ValueError(
            f"{path} is truncated: its tensors need {needed:,} bytes, and the file has {found:,}: "
            "fetch it again"
        )


class _Header:
    """Reads numbers and strings one after the other."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self._at = 0

    def needed_bytes(self) -> int:
        """The bytes up to the end of the last tensor. Raises _CutError, _UnreadableError."""
        if not _MAGIC.startswith(self._data[: len(_MAGIC)]):
            raise _UnreadableError
        self._take(len(_MAGIC))
        if self._u32() not in _VERSIONS:
            raise _UnreadableError
        num_tensors = self._u64()
        alignment = self._metadata(self._u64())
        ends = [self._tensor_end() for _ in range(num_tensors)]
        begin = -(-self._at // alignment) * alignment
        return begin + max(ends, default=0)

    def _metadata(self, count: int) -> int:
        """Skip it; returns the alignment of the data."""
        alignment = _DEFAULT_ALIGNMENT
        for _ in range(count):
            key = self._string()
            kind = self._u32()
            if key == _ALIGNMENT and kind == _U32:
                alignment = self._u32() or _DEFAULT_ALIGNMENT
            else:
                self._skip(kind, 1, _MAX_NESTED)
        return alignment

    def _tensor_end(self) -> int:
        """The end of a tensor, counted from the beginning of the data."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        self._string()
        num_dimensions = self._u32()
        if num_dimensions > _MAX_DIMENSIONS:
            raise _UnreadableError
        count = 1
        for _ in range(num_dimensions):
            count *= self._u64()
        try:
            kind = GGMLQuantizationType(self._u32())
        except ValueError:
            raise _UnreadableError from None
        block, size = GGML_QUANT_SIZES[kind]
        return self._u64() + count // block * size

    def _skip(self, kind: int, count: int, nested: int) -> None:
        if kind in _NUMBER_BYTES:
            self._take(_NUMBER_BYTES[kind] * count)
        elif kind == _STRING:
            for _ in range(count):
                self._string()
        elif kind == _ARRAY and nested:
            for _ in range(count):
                inner = self._u32()
                self._skip(inner, self._u64(), nested - 1)
        else:
            raise _UnreadableError

    def _string(self) -> bytes:
        return self._take(self._u64())

    def _u32(self) -> int:
        return int(struct.unpack("<I", self._take(4))[0])

    def _u64(self) -> int:
        return int(struct.unpack("<Q", self._take(8))[0])

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise _CutError(end)
        if end > _MAX_HEADER_BYTES:
            raise _UnreadableError
        taken = self._data[self._at : end]
        self._at = end
        return taken
