"""Splits a byte stream into server-sent events."""

import re

__all__ = ["EventSplitter"]

_LINE_END = re.compile(rb"\r\n|\n|\r")
_EVENT_START = b"data: "
_EVENT_END = b"\n\n"


class EventSplitter:
    """Returns the data of an event once the blank line after it has arrived.

    Lines may end with LF, CR LF or CR. Comments and fields other than `data` are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        """The incomplete line at the end of what was received."""
        self._data: list[bytes] = []
        """The data lines of an incomplete event."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes."""
        if not self._rest and not self._data:
            events = _whole_events(chunk)
            if events is not None:
                return events
        return self._feed_lines(chunk)

    def end(self) -> list[bytes]:
        """The last event, if the stream ended without a blank line."""
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
    """The events, if `chunk` is only complete events of one `data: ` line each, as it nearly always is."""
    if not (chunk.startswith(_EVENT_START) and chunk.endswith(_EVENT_END)) or b"\r" in chunk:
        return None
    events = chunk[len(_EVENT_START) : -len(_EVENT_END)].split(_EVENT_END + _EVENT_START)
    return events if chunk.count(b"\n") == 2 * len(events) else None
