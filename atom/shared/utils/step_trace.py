"""Records when each step was sent, computed and finished, to measure overlap and idle time.

One JSON line for each event: {"step": 7, "event": "sent", "t": seconds}. `t` is the monotonic
clock of the host, which all its processes share.
"""

import os
import time
from pathlib import Path
from typing import TextIO


class StepTrace:
    """Writes one process's events; does nothing without a directory."""

    def __init__(self, directory: str | None, process: str):
        self._file: TextIO | None = None
        if directory is not None:
            os.makedirs(directory, exist_ok=True)
            self._file = open(Path(directory, f"{process}.jsonl"), "w", buffering=1)

    def mark(self, event: str, step: int) -> None:
        """Write that `event` happens to `step` now."""
        if self._file is not None:
            self._file.write(f'{{"step": {step}, "event": "{event}", "t": {time.monotonic():.6f}}}\n')

    def close(self) -> None:
        """Flush and close the file."""
        if self._file is not None:
            self._file.close()
