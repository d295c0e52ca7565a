"""Mutual exclusion between processes by a lock file."""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

_POLL_S = 0.2


@contextlib.contextmanager
def exclusive(path: Path, deadline_s: float, on_wait: Callable[[], None]) -> Iterator[TextIO]:
    """Hold the lock of `path`, created if absent; the kernel releases it when its holder dies.

    Yields the file, in which the holder may write for the processes that wait. `on_wait` is called
    repeatedly while another process holds the lock; raises TimeoutError after `deadline_s` seconds.
    """
    deadline = time.monotonic() + deadline_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                on_wait()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is still locked after {deadline_s:.0f} s")
            time.sleep(_POLL_S)
        yield file
