"""One process at a time, by a file that all of them can reach."""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

_POLL_S = 0.2


@contextlib.contextmanager
def exclusive(path: Path, deadline_s: float, on_wait: Callable[[], None]) -> Iterator[TextIO]:
    """Hold the lock of `path`, which is made if need be; the kernel frees it when its holder dies.

    Yields the file, for the holder to write what those who wait may want to read. `on_wait` is
    called again and again while another process holds the lock; after `deadline_s` seconds of
    that comes TimeoutError.
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
