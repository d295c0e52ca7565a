"""Exceptions as text, for a log line or a message to another process."""

import errno

_MAX_LENGTH = 2000


def one_line(error: BaseException, *plain: type[BaseException]) -> str:
    """The name of the error's type and its message, on one line of bounded length.

    Without the name for instances of `plain`, whose messages are written for a user; the name
    alone for an error without a message.
    """
    name = type(error).__name__
    text = " ".join(str(error).split())
    if len(text) > _MAX_LENGTH:
        text = text[:_MAX_LENGTH] + " ..."
    if not text:
        return name
    return text if isinstance(error, plain) else f"{name}: {text}"


# Libraries report a lack of memory by many types: RuntimeError of torch's CPU allocator, ImportError of the
# dynamic loader, OSError of mmap.
_MEMORY_MESSAGES = (
    "cannot allocate memory",
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "failed to map segment from shared object",
)


# Libraries in other languages report a full disk by types and texts of their own.
_DISK_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
_DISK_MESSAGES = ("no space left on device", "disk quota exceeded")


def disk_full(error: BaseException) -> bool:
    """Whether the error, or an error that caused it, is a lack of disk space."""
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        if number in _DISK_NUMBERS or any(words in str(cause).lower() for words in _DISK_MESSAGES):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def disk_full_line(error: BaseException, cache_dir: str) -> str:
    """One line with the remedy if the error is a lack of disk space, else empty."""
    if not disk_full(error):
        return ""
    file = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    text = f"{error.strerror}{file}" if isinstance(error, OSError) and error.strerror else one_line(error)
    return f"{text}: free some, or set ATOM_CACHE_DIR ({cache_dir}) to a directory on another disk"


def out_of_memory(error: BaseException) -> str:
    """One line if the error, or an error that caused it, is a lack of memory; else empty."""
    cause: BaseException | None = error
    while cause is not None:
        if line := _memory_line(cause):
            return line if "out of memory" in line.lower() else f"out of memory: {line}"
        cause = cause.__cause__ or cause.__context__
    return ""


def _memory_line(error: BaseException) -> str:
    """The line of the error's message that reports a lack of memory; empty if none does."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return one_line(error, MemoryError, OSError)
    if not isinstance(error, RuntimeError | OSError | ImportError):
        return ""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if any(m in line.lower() for m in _MEMORY_MESSAGES)), "")
