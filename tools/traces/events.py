"""A trace file as typed events, and their nesting."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

_SLACK_NS = 2
"""Tolerance of the rounding of times, which are decimals in the file and floats here."""


class TraceError(ValueError):
    """An invalid trace, or one without the needed events; the message says what to do."""


class Event(msgspec.Struct, gc=False):
    """One entry of Chrome's trace format; times in microseconds."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: dict[str, Any] | None = None

    @property
    def start_ns(self) -> int:
        return round(self.ts * 1000)

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    @property
    def duration_ns(self) -> int:
        return round(self.dur * 1000)

    @property
    def correlation(self) -> int:
        """Common to a launch and its kernels; 0 for other events."""
        return int((self.args or {}).get("correlation", 0))


class _File(msgspec.Struct):
    traceEvents: list[Event]


def read_events(path: Path) -> list[Event]:
    """The events of a trace with a duration, sorted by thread and time; the file may be gzipped.

    Raises TraceError for an invalid file, and OSError.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        # Names of Python files may hold any bytes, which the writer does not escape.
        text = data.decode(errors="replace")
        events = msgspec.json.decode(text, type=_File).traceEvents
    except (msgspec.DecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path} is no trace of torch's profiler: {error}") from error
    lasting = [event for event in events if event.ph == "X"]
    lasting.sort(key=lambda event: (str(event.pid), str(event.tid), event.start_ns, -event.duration_ns))
    return lasting


def nested(events: Iterable[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Each event with its enclosing events, outermost first; `events` as sorted by `read_events`."""
    around: list[Event] = []
    thread: tuple[int | str, int | str] = ("", "")
    for event in events:
        if (event.pid, event.tid) != thread:
            thread = (event.pid, event.tid)
            around = []
        while around and event.start_ns >= around[-1].end_ns - _SLACK_NS:
            around.pop()
        yield event, around
        around.append(event)
