"""The state machine of replies that are text with markers.

    <think> reasoning </think> content <tool_call> … </tool_call>

A state is a method that consumes text from the buffer and returns whether to go on. The buffer keeps only
what may be the beginning of a marker, or a short header. Families add the states of their tool calls.
A call that does not follow the format becomes content, as the model wrote it, or raw arguments if its name
was sent already.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from frontend.text.reply_formats.base import CallDelta, CallText, ReplyDelta, ReplyOptions, new_call_id

__all__ = ["MAX_HEADER", "MAX_HELD", "Markers", "TextParser", "Think"]

MAX_HEADER = 1024
"""Most characters of a tool call before its arguments; longer ones are content."""
MAX_HELD = 1 << 16
"""Most characters that are held back until they can be parsed as a whole."""


class Markers:
    """Strings to search for. None of them begins another one."""

    def __init__(self, *texts: str):
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._firsts = "".join({text[0] for text in texts})
        self._longest = max(map(len, texts))

    def find(self, text: str) -> re.Match[str] | None:
        """The first marker in `text`."""
        return self._pattern.search(text)

    def held(self, text: str) -> int:
        """How many characters at the end of `text` may begin a marker."""
        low = max(len(text) - self._longest + 1, 0)
        for at in sorted(self._starts(text, low)):
            tail = text[at:]
            if any(marker.startswith(tail) for marker in self.texts):
                return len(tail)
        return 0

    def _starts(self, text: str, low: int) -> Iterable[int]:
        for first in self._firsts:
            at = text.find(first, low)
            while at >= 0:
                yield at
                at = text.find(first, at + 1)


@dataclass(frozen=True)
class Think:
    """How reasoning is marked."""

    begin: str = "<think>"
    end: str = "</think>"
    implicit: bool = False
    """Reasoning also begins without the first marker."""


class TextParser:
    """Parses one reply. This class knows no tool calls: subclasses do."""

    OPENERS: ClassVar[tuple[str, ...]] = ()
    """Markers that begin a tool call. The first one also ends the reasoning."""
    CALL_TEXT: ClassVar[CallText | None] = None
    MARKERS: ClassVar[tuple[str, ...]] = ()
    """All markers of tool calls: of these, special tokens are kept."""

    def __init__(self, options: ReplyOptions, think: Think | None, special: Mapping[int, str]):
        self._options = options
        self._think = think
        self._special = special
        self._buffer = ""
        self._out = ReplyDelta()
        self._ended = self._complete = False
        self._blank = ""
        """White space at the beginning, or after a call: content only if more content follows."""
        self._has_text = False
        """Whether there was other content since the beginning or the last call."""
        self._index = -1
        self._has_arguments = False
        parses = options.tools is not None and self.OPENERS
        self._openers = _markers(self.OPENERS) if parses else None
        self._at_start = True
        self._state: Callable[[], bool] = self._first_state()

    @property
    def called(self) -> bool:
        """Whether the reply has a tool call so far."""
        return self._index >= 0

    def feed(self, token_id: int, text: str) -> ReplyDelta:
        self._buffer += text or self._special.get(token_id, "")
        return self._run()

    def finish(self, text: str, complete: bool) -> ReplyDelta:
        self._buffer += text
        self._ended = True
        self._complete = complete
        self._run_states()
        if self._blank and not self.called:
            self._out.text += self._blank
        return self._out

    def _run(self) -> ReplyDelta:
        if not self._buffer:
            return ReplyDelta()
        self._run_states()
        out = self._out
        self._out = ReplyDelta()
        return out

    def _run_states(self) -> None:
        while self._state():
            pass

    def _first_state(self) -> Callable[[], bool]:
        if self._think is None:
            return self._first_content
        return self._reasoning if self._options.thinking else self._before

    # Reading

    def _take(self, markers: Markers) -> tuple[str, str | None]:
        """Consume (text, the marker after it). Without a marker, what may begin one stays."""
        found = markers.find(self._buffer)
        if found is not None:
            text = self._buffer[: found.start()]
            self._buffer = self._buffer[found.end() :]
            return text, found[0]
        end = len(self._buffer) - (0 if self._ended else markers.held(self._buffer))
        text = self._buffer[:end]
        self._buffer = self._buffer[end:]
        return text, None

    def _skip(self, marker: str) -> bool | None:
        """Consume `marker` if the buffer begins with it; None: too early to say."""
        if self._buffer.startswith(marker):
            self._buffer = self._buffer[len(marker) :]
            return True
        return None if not self._ended and marker.startswith(self._buffer) else False

    # Reasoning

    def _before(self) -> bool:
        """At the beginning of a reply, which may begin with reasoning."""
        assert self._think is not None
        start = self._think.begin
        text = self._buffer.lstrip()
        if text.startswith(start):
            self._buffer = text
        elif not self._ended and start.startswith(text) and len(self._buffer) < MAX_HEADER:
            return False
        elif not self._think.implicit:
            self._state = self._first_content
            return True
        self._state = self._reasoning
        return True

    def _reasoning(self) -> bool:
        assert self._think is not None
        if self._at_start:  # the prompt, or the model once more, may have written the first marker
            self._buffer = self._buffer.lstrip("\n")
            found = self._skip(self._think.begin)
            if found is not False:
                return bool(found)
            self._at_start = False
        openers = () if self._openers is None else self.OPENERS[:1]
        text, marker = self._take(_markers((self._think.end, *openers)))
        self._out.reasoning += text
        if marker is None:
            return False
        if marker == self._think.end:
            self._state = self._after
        else:
            self._opened(marker)
        return True

    def _after(self) -> bool:
        """After the reasoning: newlines and further closing markers are no content."""
        assert self._think is not None
        self._buffer = self._buffer.lstrip("\n")
        found = self._skip(self._think.end)
        if found is not False:
            return bool(found)
        self._state = self._first_content
        return True

    # Content

    def _first_content(self) -> bool:
        """The state at the beginning of the content."""
        self._state = self._content
        return True

    def _content(self) -> bool:
        if self._openers is None:
            self._out.text += self._buffer
            self._buffer = ""
            return False
        text, marker = self._take(self._openers)
        self._write(text)
        if marker is None:
            return False
        self._opened(marker)
        return True

    def _opened(self, marker: str) -> None:
        """Set the state that follows the first marker of a tool call."""
        raise NotImplementedError

    def _write(self, text: str) -> None:
        """Append content. Tool calls drop white space before them if there is nothing else."""
        if not self._has_text:
            self._blank += text
            if not self._blank or (self._blank.isspace() and len(self._blank) <= MAX_HEADER):
                return
            text = self._blank
            self._blank = ""
            self._has_text = True
        self._out.text += text

    def _reject(self, raw: str) -> None:
        """Turn a malformed call into content."""
        self._write(raw)
        self._state = self._content

    # Tool calls

    def _start(self, name: str, call_id: str = "") -> None:
        """Begin a tool call."""
        self._blank = ""
        self._has_text = False
        self._index += 1
        self._has_arguments = False
        if self._shows_call:
            self._out.calls.append(CallDelta(self._index, call_id or new_call_id(), name))

    def _argue(self, text: str) -> None:
        """Append to the arguments of the current call."""
        if not text:
            return
        self._has_arguments = True
        if not self._shows_call:
            return
        calls = self._out.calls
        if calls and calls[-1].index == self._index:
            calls[-1].arguments += text
        else:
            calls.append(CallDelta(self._index, arguments=text))

    def _end(self) -> None:
        """End the current call; without arguments they are an empty object."""
        self._blank = ""
        self._has_text = False
        if not self._has_arguments:
            self._argue("{}")

    @property
    def _shows_call(self) -> bool:
        return self._index == 0 or self._options.parallel


_MADE: dict[tuple[str, ...], Markers] = {}


def _markers(texts: tuple[str, ...]) -> Markers:
    """One object for all parsers; the families' markers are few."""
    if texts not in _MADE:
        _MADE[texts] = Markers(*texts)
    return _MADE[texts]
