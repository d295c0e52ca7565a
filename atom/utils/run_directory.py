"""A private directory for the sockets of one engine, and the removal of those that were left behind.

    <temporary directory>/atom-run-XXXXXXXX    mode 0700, its inode locked by its owner

The kernel frees the lock when the owner dies, however it dies. The next engine of the same
user removes every such directory that nobody locks.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "atom-run-"
# Of a directory that has no lock yet: no sweep looks at it.
_UNLOCKED_PREFIX = "atom-new-"
# A local socket's path has this many bytes at most (sun_path), and the longest of ours needs some.
_LONGEST_SOCKET_PATH = 107
_LONGEST_NAME = len("/supervisor")


class RunDirectory:
    """`path` exists until `close`. Raises OSError where it cannot be made."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        _sweep(parent)
        made = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=parent))
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.with_name(_PREFIX + made.name.removeprefix(_UNLOCKED_PREFIX))
        made.rename(self.path)
        if len(os.fsencode(self.path)) + _LONGEST_NAME > _LONGEST_SOCKET_PATH:
            self.close()
            raise OSError(f"the path {parent} is too long for local sockets: set TMPDIR to a shorter one")

    def close(self) -> None:
        """Remove the directory. May be called twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(parent: Path) -> None:
    for path in parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError), _open_directory(path) as directory:  # another's, or gone already
            if os.fstat(directory).st_uid != os.getuid():
                continue
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _open_directory(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
