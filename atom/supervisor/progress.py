"""Progress of the phases of a start: bars on a terminal, else one line for each phase."""

import sys
import time

from tqdm import tqdm

from atom.shared.messages.supervisor import Progress
from atom.shared.utils.logger import get_logger


class ProgressBars:
    """Draws `Progress` messages, one phase of one process at a time."""

    def __init__(self) -> None:
        self._phase = ("", "")
        self._started = 0.0
        self._bar: tqdm[None] | None = None

    def update(self, progress: Progress) -> None:
        """Update the bar of a phase; a finished phase leaves one line."""
        if (progress.process, progress.phase) != self._phase:
            self._open(progress)
        if self._bar is not None:
            self._bar.update(progress.done - self._bar.n)
        if progress.done >= progress.total:
            self._finish(progress)

    def close(self) -> None:
        """Clear an unfinished bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None
        self._phase = ("", "")

    def _open(self, progress: Progress) -> None:
        self.close()
        self._phase = (progress.process, progress.phase)
        self._started = time.monotonic()
        if sys.stderr.isatty():
            self._bar = tqdm(total=progress.total, desc=progress.phase, leave=False)

    def _finish(self, progress: Progress) -> None:
        self.close()
        seconds = time.monotonic() - self._started
        get_logger().info("%s: %d done in %.1f s", progress.phase, progress.total, seconds)
