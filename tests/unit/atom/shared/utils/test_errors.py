"""Exceptions as one line of text, and those that report a lack of memory."""

import errno

import pytest

from atom.shared.utils.errors import disk_full, disk_full_line, one_line, out_of_memory


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no\n  such file"), "no such file"),
        (
            UnicodeDecodeError("utf-8", b"", 0, 1, "bad"),
            "'utf-8' codec can't decode bytes in position 0-0: bad",
        ),
        (RuntimeError("out of\nluck"), "RuntimeError: out of luck"),
        (ValueError(), "ValueError"),
        (KeyError(), "KeyError"),
    ],
)
def test_message_and_type(error: Exception, text: str) -> None:
    assert one_line(error, ValueError, MemoryError) == text


def test_length_is_bounded() -> None:
    assert len(one_line(RuntimeError("x" * 10_000_000))) < 2100


def caused_by(cause: Exception) -> Exception:
    try:
        raise ImportError("a module failed\nsee the manual") from cause
    except ImportError as error:
        return error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError("Unable to allocate 23 GiB"), "out of memory: Unable to allocate 23 GiB"),
        (MemoryError(), "out of memory: MemoryError"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory: [Errno 12] Cannot allocate memory"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes\n  frame #0"),
            "out of memory: [enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes",
        ),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
            "CUDA out of memory. Tried to allocate 2 GiB",
        ),
        (
            caused_by(ImportError("x.so: failed to map segment from shared object")),
            "out of memory: x.so: failed to map segment from shared object",
        ),
        (ValueError("a prompt that reads out of memory"), ""),
        (OSError(errno.ENOENT, "No such file"), ""),
        (RuntimeError("shapes differ"), ""),
    ],
)
def test_lack_of_memory(error: Exception, line: str) -> None:
    assert out_of_memory(error) == line


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "x"), True),
        (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (caused_by(OSError(errno.ENOSPC, "No space left on device")), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (ValueError("no space"), False),
    ],
)
def test_a_full_disk(error: Exception, full: bool) -> None:
    assert disk_full(error) is full
    assert ("ATOM_CACHE_DIR (/a/cache)" in disk_full_line(error, "/a/cache")) is full
