"""A private directory for the sockets of one engine, and the removal of leftover ones.

    <temporary directory>/atom-run-XXXXXXXX    mode 0700, its inode locked by its owner

The kernel releases the lock when the owner dies. The next engine of the same user removes every
such directory without a lock.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "atom-run-"
# A directory that has no lock yet; `_sweep` skips it.
_UNLOCKED_PREFIX = "atom-new-"
# Limit of the path of a local socket in bytes (sun_path), and the longest name we append.
_MAX_SOCKET_PATH = 107
_LONGEST_NAME = len("/engine-1023.99999/supervisor")
_CREDENTIALS = struct.Struct("3i")
_NO_SERVER = (
    "this is neither the process id nor the admin socket of a running server on this host: if it has ended, "
    "start this one without it"
)


class RunDirectory:
    """`path` exists until `close`. Raises OSError when it cannot be created."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        _sweep(parent)
        made = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=parent))
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.with_name(_PREFIX + made.name.removeprefix(_UNLOCKED_PREFIX))
        made.rename(self.path)
        if len(os.fsencode(self.path)) + _LONGEST_NAME > _MAX_SOCKET_PATH:
            self.close()
            raise OSError(f"the path {parent} is too long for local sockets: set TMPDIR to a shorter one")

    def close(self) -> None:
        """Remove the directory. May be called twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def run_directory_of(target: str) -> Path:
    """That of a running server: `target` is the process id of its supervisor, or its admin socket.

    Raises OSError, whose text says what `target` is not.
    """
    candidates = [int(target)] if target.isdecimal() else _servers_of(Path(target))
    for pid in candidates:
        try:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    path = Path(os.readlink(descriptor))
                    if path.name.startswith(_PREFIX) and path.is_dir():
                        return path
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        except PermissionError:
            raise OSError(f"process {pid} is another user's") from None
    raise OSError(_NO_SERVER)


def _servers_of(path: Path) -> list[int]:
    """The process that listens at a Unix socket, and its parent: a frontend has its parent's socket."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):  # the file outlives its server
            raise OSError(_NO_SERVER) from None
        raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(raw)[0]
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise OSError(_NO_SERVER) from None
    return [pid, int(status.rpartition(")")[2].split()[1])]


def _sweep(parent: Path) -> None:
    for path in parent.glob(_PREFIX + "*"):
        with (
            contextlib.suppress(OSError),
            _open_directory(path) as directory,
        ):  # of another user, or removed already
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
