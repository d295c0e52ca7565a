"""When each step was sent, computed and answered, for measuring overlap and idle time.

One JSON line an event: {"step": 7, "event": "sent", "t": seconds}. The clock is the machine's
monotonic one, so that the files of different processes on one host can be compared.
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
        """Note that `event` happens to `step` now."""
        if self._file is not None:
            self._file.write(f'{{"step": {step}, "event": "{event}", "t": {time.monotonic():.6f}}}\n')

    def close(self) -> None:
        """Write out what is buffered."""
        if self._file is not None:
            self._file.close()
