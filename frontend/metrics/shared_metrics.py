"""The metrics of all frontends of a server: a scrape reaches any of them and shows the sum.

Each frontend keeps its counters in a file, `frontend-<index>.metrics`, about every second and at each
scrape that it answers. A scrape reads the files of the others, so it never waits for a frontend that
hangs or is dead, and what a dead one has counted is not lost: a sum that fell would look like a restart
of the server. A frontend that is started again continues with the counters of its file.

Between two scrapes no counter falls: what a scrape has shown of its own frontend is in the file then.
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atom.shared.messages.codec import Decoder, WireError, encode
from atom.shared.utils.logger import get_logger
from frontend.errors import UnavailableError
from frontend.metrics.metrics import Metrics, RunningRequest

__all__ = ["MAX_SHOWN", "SharedMetrics", "Totals"]

MAX_SHOWN = 64
"""Requests that each frontend tells the others about."""
_INTERVAL_S = 1.0
# A file older than this is of a frontend that has ended or hangs.
_FRESH_S = 5.0


class _Record(msgspec.Struct):
    """The contents of a file."""

    at: float
    """When it was written: the monotonic clock, which all processes of a host share."""
    live: int
    metrics: Metrics
    oldest: list[RunningRequest] = []


@dataclass(frozen=True, slots=True)
class Totals:
    """Figures of all frontends."""

    metrics: Metrics
    live: int
    """Unfinished sequences, of the frontends that run."""
    oldest: list[RunningRequest]
    """The oldest of them: at most MAX_SHOWN, the oldest first."""


class SharedMetrics:
    """The `metrics` of this frontend, and those of the others in `directory` (none if it is empty).

    `live` returns the number of unfinished sequences, `oldest` so many of them.
    """

    def __init__(
        self,
        directory: str,
        index: int,
        life: int,
        metrics: Metrics,
        live: Callable[[], int],
        oldest: Callable[[int], list[RunningRequest]],
    ):
        """Adds to `metrics` what frontend `index` had counted before it was restarted."""
        self._directory = Path(directory) if directory else None
        self._name = f"frontend-{index}.metrics"
        self._metrics = metrics
        self._live = live
        self._oldest = oldest
        self._decoder = Decoder[_Record](_Record)
        self._writing = asyncio.Lock()
        self._error = ""
        if self._directory is not None and (earlier := self._read(self._directory / self._name)):
            metrics.merge(earlier.metrics)
        metrics.restarts = life  # also those that ended before they wrote their file

    async def keep(self) -> None:
        """Write the file about every second, until cancelled."""
        while self._directory is not None:
            await self._write(self._directory, self._frame())
            await asyncio.sleep(_INTERVAL_S)

    async def totals(self, timeout_s: float, publish: bool = True) -> Totals:
        """The sums now. Raises UnavailableError when the files cannot be read in time.

        Without `publish` the file of this frontend is not written first: another one may show less later.
        """
        frame = self._frame()
        try:
            async with asyncio.timeout(timeout_s):
                if publish and self._directory is not None:
                    await self._write(self._directory, frame)
                return await asyncio.to_thread(self._sum, frame)
        except TimeoutError:
            reason = f"the files in {self._directory} were not read within {timeout_s:g} s"
            raise UnavailableError(f"no metrics of the other frontends: {reason}") from None

    def _frame(self) -> bytes:
        """The record of this frontend: fast, and a copy for other threads."""
        return encode(_Record(time.monotonic(), self._live(), self._metrics, self._oldest(MAX_SHOWN)))

    def _sum(self, frame: bytes) -> Totals:
        own = self._decoder.decode(frame)
        records = [own, *self._read_others()]
        total = Metrics()
        for record in records:
            total.merge(record.metrics)
        running = [record for record in records if own.at - record.at < _FRESH_S]
        oldest = sorted(
            (each for record in running for each in record.oldest), key=lambda each: each.arrived_at
        )
        return Totals(total, sum(record.live for record in running), oldest[:MAX_SHOWN])

    async def _write(self, directory: Path, frame: bytes) -> None:
        async with self._writing:
            try:
                await asyncio.to_thread(_replace, directory / self._name, frame)
                self._error = ""
            except OSError as error:  # a full disk must not end the server
                if str(error) != self._error:
                    self._error = str(error)
                    get_logger().error("other frontends do not see the metrics of this one: %s", error)

    def _read_others(self) -> list[_Record]:
        if self._directory is None:
            return []
        paths = sorted(path for path in self._directory.glob("frontend-*.metrics") if path.name != self._name)
        return [record for path in paths if (record := self._read(path)) is not None]

    def _read(self, path: Path) -> _Record | None:
        """None for a file that is not there or not readable; the latter is logged."""
        try:
            return self._decoder.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, WireError) as error:
            get_logger().error("the metrics in %s are left out: %s", path, error)
            return None


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old contents or the new ones."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, path)
