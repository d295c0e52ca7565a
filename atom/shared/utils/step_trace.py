"""Records when each step was sent, computed and finished, to measure overlap and idle time.

One JSON line for each event: {"step": 7, "event": "sent", "t": seconds}. `t` is the monotonic
clock of the host, which all its processes share.
"""

import errno
import os
import time
from io import FileIO
from pathlib import Path

from atom.shared.utils.logger import get_logger

_FULL = (errno.ENOSPC, errno.EDQUOT)


class StepTrace:
    """Writes one process's events; does nothing without a directory, and no more once its disk is full."""

    def __init__(self, directory: str | None, process: str):
        self._file: FileIO | None = None
        if directory is not None:
            path = Path(directory, f"{process}.jsonl")
            try:
                os.makedirs(directory, exist_ok=True)
                self._file = FileIO(path, "w")
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                _warn(path, error)

    def mark(self, event: str, step: int) -> None:
        """Write that `event` happens to `step` now."""
        if self._file is None:
            return
        line = f'{{"step": {step}, "event": "{event}", "t": {time.monotonic():.6f}}}\n'.encode()
        size, written = self._file.tell(), 0
        try:
            while written < len(line):  # a disk that gets full takes a part
                written += self._file.write(line[written:])
        except OSError as error:
            _warn(self._file.name, error)
            self._file.truncate(size)
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None


def _warn(path: object, error: OSError) -> None:
    get_logger().warning("--step-trace: no further steps are recorded in %s: %s", path, error.strerror)
