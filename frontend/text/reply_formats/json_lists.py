"""Tool calls that are JSON objects in a list after a marker: Granite 3, Phi-4-mini, older models of Mistral.

    <|tool_call|>[{"name": "f", "arguments": {…}}, {"name": "g", "arguments": {…}}]

An object without a list is a list of one.
"""

from typing import ClassVar

from frontend.text.reply_formats.base import CallText
from frontend.text.reply_formats.json_calls import JsonCalls, JsonSpan, more_than_fields
from frontend.text.reply_formats.text import MAX_HEADER, Markers, markers_of

__all__ = ["Granite", "JsonLists", "Phi4Mini"]

_SEPARATORS = ", \t\r\n"


class JsonLists(JsonCalls):
    """States around the objects of one list."""

    ENDS: ClassVar[tuple[str, ...]] = ()
    """Markers of which one may follow a list."""

    _in_list = False
    _rest: JsonSpan | None = None
    """Span of the object in which the arguments have ended."""

    def _opened(self, marker: str) -> None:
        super()._opened(marker)
        self._in_list = False
        self._state = self._list

    def _list(self) -> bool:
        """After the marker."""
        text = self._buffer.lstrip()
        if not text and not self._ended and len(self._buffer) <= MAX_HEADER:
            return False
        if text.startswith("["):
            self._in_list = True
            self._opener += self._buffer[: len(self._buffer) - len(text) + 1]
            self._buffer = text[1:]
            self._state = self._element
        else:
            self._state = self._header
        return True

    def _element(self) -> bool:
        """In a list, before a call or the end."""
        text = self._buffer.lstrip(_SEPARATORS)
        if self._opener:  # of the first call, which may be none
            self._opener += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        if not text and not self._ended and len(self._opener) <= MAX_HEADER:
            return False
        if text.startswith("]") and not self._opener:
            self._buffer = text[1:]
            self._state = self._closing
        elif text.startswith("{"):
            self._raw = ""
            self._span = JsonSpan()
            self._state = self._header
        else:
            is_cut = not text and not self._complete  # perhaps within a marker
            part = markers_of(self.MARKERS).held(self._opener) if is_cut else 0
            self._reject(self._opener[: len(self._opener) - part])
        return True

    def _tail(self) -> bool:
        """After the arguments: the end of the object, perhaps with further fields."""
        if self._rest is None:
            self._rest = JsonSpan(depth=1)
        end = self._rest.feed(self._buffer)
        self._raw += self._buffer[:end]
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None and not self._ended and len(self._raw) <= MAX_HEADER:
            return False
        self._rest = None
        if self._raw.endswith("]"):  # the object has no end, but its list has
            self._raw = self._raw[:-1]
            self._buffer = "]" + self._buffer
        self._write_markup(more_than_fields(self._raw))
        self._state = self._after_call
        return True

    def _parsed(self, marker: str) -> bool:
        super()._parsed(marker)
        if self._state == self._tail:  # the call was read as a whole
            self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        self._end()
        self._raw = self._opener = ""
        self._state = self._element if self._in_list else self._closing
        return True

    def _closing(self) -> bool:
        """After a list."""
        text = self._buffer.lstrip()
        end = next((marker for marker in self.ENDS if text.startswith(marker)), None)
        if end is not None:
            self._buffer = text[len(end) :]
        elif any(marker.startswith(text) for marker in self.ENDS):
            if not self._ended and len(self._buffer) <= MAX_HEADER:
                return False
            if self._ended and not self._complete:
                self._buffer = ""
        self._state = self._content
        return True


def _call_text(marker: str, other_marker: str) -> CallText:
    """How calls are written when they are enforced: a list after `marker`."""
    return CallText(
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        end="}",
        separator=", ",
        trigger=marker,
        section=(f"{marker}[", "]"),
        no_content=(other_marker,),
    )


class Granite(JsonLists):
    """Parses one reply of Granite 3; the models of 3.1 write the marker as text."""

    OPENERS = ("<|tool_call|>", "<tool_call>")
    DRAFT_OPENERS = OPENERS
    ENDS = ("</tool_call>",)
    MARKERS = (*OPENERS, *ENDS)
    CLOSERS = Markers(*MARKERS)
    CALL_TEXT = _call_text("<|tool_call|>", "<tool_call>")


class Phi4Mini(JsonLists):
    """Parses one reply of Phi-4-mini, with the marker of its training data or of its vocabulary."""

    OPENERS = ("functools", "<|tool_call|>")
    DRAFT_OPENERS = OPENERS
    ENDS = ("<|/tool_call|>",)
    MARKERS = (*OPENERS, *ENDS)
    CLOSERS = Markers(*MARKERS)
    CALL_TEXT = _call_text("functools", "<|tool_call|>")
