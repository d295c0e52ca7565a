"""The state machine of replies that are text with markers.

    <think> reasoning </think> content <tool_call> … </tool_call>

A state is a method that consumes text from the buffer and returns whether to go on. The buffer keeps only
what may be the beginning of a marker, or a short header. Families add the states of their tool calls.
A call that does not follow the format becomes content, as the model wrote it, or raw arguments if its name
was sent already. Calls in the reasoning are in `drafts`. Where a reply is cut off within a marker, or after a
call within the tags of another one, that part is left out.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from frontend.text.reply_formats.base import CallDelta, CallText, ReplyDelta, ReplyOptions, new_call_id
from frontend.text.reply_formats.drafts import Drafts

__all__ = ["MAX_HEADER", "MAX_HELD", "Markers", "TextParser", "Think", "markers_of"]

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
            if any(marker.startswith(tail) and marker != tail for marker in self.texts):
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
    around: tuple[str, str] | None = None
    """Tags around the content that follows reasoning."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers and tags."""
        return (self.begin, self.end, *(self.around or ()))


class TextParser:
    """Parses one reply. This class knows no tool calls: subclasses do."""

    OPENERS: ClassVar[tuple[str, ...]] = ()
    """Markers that begin a tool call."""
    DRAFT_OPENERS: ClassVar[tuple[str, ...]] = ()
    """Those that begin one in the reasoning too; empty: only the first one does."""
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
        self._openers = markers_of(self.OPENERS) if parses else None
        self._at_start = True
        self._drafts: Drafts | None = None
        """Calls in the reasoning."""
        self._num_read = 0
        """Characters so far."""
        self.calls_at: int | None = None
        """Where the calls begin with which the text ends so far; None: it ends with other text."""
        self._num_ended = 0
        """How many of these calls are whole."""
        self._in_call = False
        self._content_end = ""
        """The tag after the content, which is no part of it."""
        self._state: Callable[[], bool] = self._first_state()

    @property
    def called(self) -> bool:
        """Whether the reply has a tool call so far."""
        return self._index >= 0

    @property
    def num_parsed(self) -> int:
        """Characters so far, but for those that may begin a marker."""
        return self._num_read - len(self._buffer)

    @property
    def ends_with_call(self) -> bool:
        """Whether the text ends with a whole call."""
        return self.calls_at is not None and self._num_ended > 0 and not self._in_call

    def feed(self, token_id: int, text: str) -> ReplyDelta:
        text = text or self._special.get(token_id, "")
        self._buffer += text
        self._num_read += len(text)
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
        end = len(self._buffer) - self._marker_part(markers)
        text = self._buffer[:end]
        self._buffer = "" if self._ended else self._buffer[end:]
        return text, None

    def _marker_part(self, markers: Markers) -> int:
        """How many characters at the end of the buffer are the beginning of a marker.

        At the end of a reply it is none, unless the reply was cut off.
        """
        if not self._ended:
            return markers.held(self._buffer)
        if self._complete:
            return 0
        others = markers_of(self.MARKERS).held(self._buffer) if self._openers is not None else 0
        return max(markers.held(self._buffer), others)

    def _skip(self, marker: str) -> bool | None:
        """Consume `marker` if the buffer begins with it; None: too early to say."""
        if self._buffer.startswith(marker):
            self._buffer = self._buffer[len(marker) :]
            return True
        if not marker.startswith(self._buffer):
            return False
        if self._ended and not self._complete:
            self._buffer = ""
        return False if self._ended else None

    # Reasoning

    def _before(self) -> bool:
        """At the beginning of a reply, which may begin with reasoning, or end what the prompt began."""
        think = self._think
        assert think is not None
        text = self._buffer.lstrip()
        may_begin = any(marker.startswith(text) for marker in (think.begin, think.end))
        if text.startswith((think.begin, think.end)):
            self._buffer = text
        elif may_begin and not self._ended and len(self._buffer) < MAX_HEADER:
            return False
        elif not think.implicit:
            if text and may_begin and not self._complete and self._ended:
                self._buffer = ""
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
        if self._openers is not None and self._drafts is None:
            self._drafts = self._new_drafts()
        num_unread = len(self._buffer)
        text, marker = self._take(markers_of((self._think.end,)))
        self._out.reasoning += text if self._drafts is None else self._drafts.read(text)
        if marker is not None:
            self._out.reasoning += "" if self._drafts is None else self._drafts.drop()
            self._state = self._after
            return True
        if self._ended and self._drafts is not None:
            return self._end_drafts(self._drafts, was_cut=len(text) < num_unread)
        return False

    def _new_drafts(self) -> Drafts:
        parser = type(self)(self._options, None, {})
        parser._openers = markers_of(self.DRAFT_OPENERS or self.OPENERS[:1])
        parser._state = parser._content
        return Drafts(parser)

    def _end_drafts(self, drafts: Drafts, was_cut: bool) -> bool:
        """At the end of a reply that did not close its reasoning, or `was_cut` within the closing marker."""
        text, calls = drafts.end(self._complete)
        if not self._complete and not was_cut:
            text = text[: len(text) - markers_of(self.MARKERS).held(text)]
        self._out.reasoning += text
        self._buffer = calls
        self._state = self._content
        return bool(calls)

    def _after(self) -> bool:
        """After the reasoning: newlines and further closing markers are no content."""
        assert self._think is not None
        self._buffer = self._buffer.lstrip("\n")
        found = self._skip(self._think.end)
        if found is not False:
            return bool(found)
        self._state = self._first_content if self._think.around is None else self._before_content
        return True

    def _before_content(self) -> bool:
        """Where a tag may begin the content; another one ends it then."""
        assert self._think is not None and self._think.around is not None
        begin, end = self._think.around
        found = self._skip(begin)
        if found is None:
            return False
        self._content_end = end if found else ""
        self._state = self._after_tag if found else self._first_content
        return True

    def _after_tag(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if not self._buffer and not self._ended:
            return False
        self._state = self._first_content
        return True

    # Content

    def _first_content(self) -> bool:
        """The state at the beginning of the content."""
        self._state = self._content
        return True

    def _content(self) -> bool:
        openers = () if self._openers is None else self._openers.texts
        ends = (self._content_end,) if self._content_end else ()
        if not openers and not ends:
            self._out.text += self._buffer
            self._buffer = ""
            return False
        text, marker = self._take(markers_of((*openers, *ends)))
        if openers:
            self._write(text)
        else:
            self._out.text += text
        if marker is None:
            return False
        if marker != self._content_end:
            self._open(marker)
        return True

    def _open(self, marker: str) -> None:
        """Begin a tool call with `marker`, which was read just now."""
        if self.calls_at is None:
            self.calls_at = self.num_parsed - len(marker)
            self._num_ended = 0
            self._in_call = False
        self._opened(marker)

    def _opened(self, marker: str) -> None:
        """Set the state that follows the first marker of a tool call."""
        raise NotImplementedError

    def _write(self, text: str) -> None:
        """Append content. Tool calls drop white space before them if there is nothing else."""
        if text and not text.isspace():
            self.calls_at = None
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
        self._write_markup(raw)
        self._state = self._content

    def _write_markup(self, raw: str) -> None:
        """Append content that looks like a part of a call: at a cut after a call it is one."""
        if self._complete or not self._ended or not self.called:
            self._write(raw)

    # Tool calls

    def _start(self, name: str, call_id: str = "") -> None:
        """Begin a tool call."""
        self._blank = ""
        self._has_text = False
        self._index += 1
        self._has_arguments = False
        self._in_call = True
        if self._shows_call:
            self._out.calls.append(CallDelta(self._index, call_id or self._new_id(), name))

    def _new_id(self) -> str:
        """The id of a call to which the model gives none."""
        return new_call_id()

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
        self._in_call = False
        self._num_ended += 1
        self._blank = ""
        self._has_text = False
        if not self._has_arguments:
            self._argue("{}")

    @property
    def _shows_call(self) -> bool:
        return self._index == 0 or self._options.parallel


_MADE: dict[tuple[str, ...], Markers] = {}


def markers_of(texts: tuple[str, ...]) -> Markers:
    """One object for all parsers; the families' markers are few."""
    if texts not in _MADE:
        _MADE[texts] = Markers(*texts)
    return _MADE[texts]
