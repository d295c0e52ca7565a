"""Server-sent events out of bytes that arrive in pieces of any size.

What this module does not know: what the events mean.
"""

import re

__all__ = ["EventSplitter"]

_LINE_END = re.compile(rb"\r\n|\n|\r")
_EVENT_START = b"data: "
_EVENT_END = b"\n\n"


class EventSplitter:
    """Gives the data of each event once the blank line behind it has come.

    Lines may end with LF, CR LF or CR. Comments and fields other than `data` are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        """The beginning of a line."""
        self._data: list[bytes] = []
        """The data lines of an event that has not ended."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes."""
        if not self._rest and not self._data:
            events = _whole_events(chunk)
            if events is not None:
                return events
        return self._feed_lines(chunk)

    def end(self) -> list[bytes]:
        """The last event, where the stream ended without a blank line behind it."""
        return self._feed_lines(b"\n\n")

    def _feed_lines(self, chunk: bytes) -> list[bytes]:
        received = self._rest + chunk
        # A CR at the end may be half of CR LF.
        end = len(received) - received.endswith(b"\r")
        lines = _LINE_END.split(received[:end])
        self._rest = lines.pop() + received[end:]
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


def _whole_events(chunk: bytes) -> list[bytes] | None:
    """Events of one `data: ` line each, if that is all there is in `chunk`: nearly always so."""
    if not (chunk.startswith(_EVENT_START) and chunk.endswith(_EVENT_END)) or b"\r" in chunk:
        return None
    events = chunk[len(_EVENT_START) : -len(_EVENT_END)].split(_EVENT_END + _EVENT_START)
    return events if chunk.count(b"\n") == 2 * len(events) else None
