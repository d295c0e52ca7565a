"""What processes of a test leave in shared memory, and nobody else's files."""

import contextlib
import os
import threading
from pathlib import Path

import psutil

_PLACE = "/dev/shm/"
_EVERY_S = 0.5


class SharedMemoryWatch:
    """Looks, twice a second, at what children of this process have mapped or open below /dev/shm.

    Other programs make and remove files there at the same time.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shared-memory-watch", daemon=True)
        self._thread.start()

    def end(self) -> set[str]:
        """Names of theirs that still exist, though no child uses them."""
        self._ended.set()
        self._thread.join()
        return (self._seen & set(os.listdir(_PLACE))) - _used_by_children()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._seen |= _used_by_children()


def _used_by_children() -> set[str]:
    found: set[str] = set()
    for child in psutil.Process().children(recursive=True):
        found |= _mapped(child.pid) | _open(child.pid)
    return found


def _mapped(pid: int) -> set[str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.partition(_PLACE)[2].removesuffix(" (deleted)") for line in lines if _PLACE in line}
    return set()


def _open(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith(_PLACE):
                    found.add(target.removeprefix(_PLACE).removesuffix(" (deleted)"))
    return found
