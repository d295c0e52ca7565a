"""Progress of the phases of a start: bars on a terminal, else a line every few seconds and at the end."""

import sys
import time

from tqdm import tqdm

from atom.shared.messages.supervisor import Progress
from atom.shared.utils.logger import get_logger

_LINE_S = 10.0


class ProgressBars:
    """Draws `Progress` messages, one phase of one process at a time."""

    def __init__(self) -> None:
        self._phase = ("", "")
        self._started = self._line_at = 0.0
        self._bar: tqdm[None] | None = None

    def update(self, progress: Progress) -> None:
        """Update the bar of a phase; a finished phase leaves one line."""
        if (progress.process, progress.phase) != self._phase:
            self._open(progress)
        if self._bar is not None:
            self._bar.update(progress.done - self._bar.n)
        elif 0 < progress.done < progress.total:
            self._line(progress)
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
        self._line_at = self._started + _LINE_S
        if sys.stderr.isatty():
            self._bar = tqdm(total=progress.total, desc=progress.phase, leave=False)

    def _line(self, progress: Progress) -> None:
        """Say how far the phase is, if it is time to."""
        now = time.monotonic()
        if now < self._line_at:
            return
        self._line_at = now + _LINE_S
        left_s = (now - self._started) * (progress.total - progress.done) / progress.done
        share = progress.done / progress.total
        get_logger().info("%s: %.0f %%, about %.0f s left", progress.phase, 100 * share, left_s)

    def _finish(self, progress: Progress) -> None:
        self.close()
        seconds = time.monotonic() - self._started
        get_logger().info("%s: %d done in %.1f s", progress.phase, progress.total, seconds)
