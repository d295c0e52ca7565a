"""Tool calls that are JSON objects with a name and arguments.

{"name": "f", "arguments": {…}}
└────── header ──────────┘└args┘
"""

import json
import re
from collections.abc import Mapping
from typing import ClassVar

from frontend.text.reply_formats.base import ReplyOptions
from frontend.text.reply_formats.text import MAX_HEADER, MAX_HELD, Markers, TextParser, Think

__all__ = ["JsonCalls", "JsonSpan", "more_than_fields"]

_STRING = r'"(?:[^"\\]|\\.)*+"'
_HEADER = re.compile(
    rf'\s*+\{{\s*+(?:"(?:type|id)"\s*+:\s*+{_STRING}\s*+,\s*+)*+'
    rf'"name"\s*+:\s*+({_STRING})\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\S)',
    re.DOTALL,
)
_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')


class JsonSpan:
    """Finds the end of a JSON object or array in a streamed text, of which `depth` have begun before it."""

    __slots__ = ("_depth", "_escaped", "broken", "in_string")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._escaped = False
        self.in_string = False
        self.broken = False
        """Whether it ended at `<` outside of a string, which no JSON has."""

    def feed(self, text: str) -> int | None:
        """Where in `text` the value ends; None: not in it."""
        at = 0
        if self._escaped and text:
            self._escaped = False
            at = 1
        while (found := (_INSIDE if self.in_string else _OUTSIDE).search(text, at)) is not None:
            character = found[0]
            at = found.end()
            if character == "\\":
                self._escaped = at == len(text)
                at += 1
            elif character == '"':
                self.in_string = not self.in_string
            elif character == "<":
                self.broken = True
                return at - 1
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    return at
        return None


class JsonCalls(TextParser):
    """States of one call: header, arguments, tail. An unusual header is held until the call is whole."""

    CLOSERS: ClassVar[Markers]
    """Markers that end a call, or begin the next one."""

    def __init__(self, options: ReplyOptions, think: Think | None, special: Mapping[int, str]):
        super().__init__(options, think, special)
        self._span = JsonSpan()
        self._opener = self._raw = ""

    def _opened(self, marker: str) -> None:
        self._opener = marker
        self._raw = ""
        self._span = JsonSpan()
        self._state = self._header

    def _header(self) -> bool:
        found = _HEADER.match(self._buffer)
        if found is not None and self._buffer[found.end()] == "{" and (name := _name(found[1])):
            if not self._accepts(name):
                return self._give_up()
            self._start(name)
            self._buffer = self._buffer[found.end() :]
            self._state = self._arguments
            return True
        if (text := self._buffer.lstrip()) and not text.startswith("{"):
            return self._give_up()
        over = found is not None or self._ended or len(self._buffer) > MAX_HEADER
        if over or self.CLOSERS.find(self._buffer) is not None:
            self._state = self._whole
            return True
        return False

    def _arguments(self) -> bool:
        end = self._span.feed(self._buffer)
        self._argue(self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return False
        self._raw = ""
        self._state = self._raw_arguments if self._span.broken else self._tail
        return True

    def _raw_arguments(self) -> bool:
        text, marker = self._take(self.CLOSERS)
        self._argue(text)
        if marker is None:
            return False
        self._closed(marker)
        return True

    def _tail(self) -> bool:
        """After the arguments: the end of the object, perhaps with further fields."""
        text, marker = self._take(self.CLOSERS)
        self._raw += text
        if marker is None and not self._ended and len(self._raw) <= MAX_HEADER:
            return False
        self._write(more_than_fields(self._raw))
        self._closed(marker)
        return marker is not None

    def _whole(self) -> bool:
        """A call in another order, or no call."""
        text, marker = self._take(self.CLOSERS)
        end = self._span.feed(text)
        if end is not None and not self._span.broken:
            self._raw += text[:end]
            self._buffer = text[end:] + (marker or "") + self._buffer
            return self._parsed("")
        self._raw += text
        fits = len(self._raw) <= MAX_HELD
        if marker is None and not self._ended and fits:
            return False
        if marker is not None and self._span.in_string and not self._span.broken and fits:
            self._raw += marker  # text of a string
            return True
        return self._parsed(marker or "")

    def _parsed(self, marker: str) -> bool:
        call = _call(self._raw)
        if call is None or not self._accepts(call[0]):
            if marker in self.OPENERS:
                self._buffer = marker + self._buffer
                marker = ""
            self._reject(self._opener + self._raw + marker)
            return True
        self._start(call[0])
        self._argue(call[1])
        self._buffer = marker + self._buffer
        self._raw = ""
        self._state = self._tail
        return True

    def _give_up(self) -> bool:
        """The header is not one of a call: it is content, in which a call may begin."""
        self._reject(self._opener)
        return True

    def _accepts(self, name: str) -> bool:
        """Whether a call of this function can be meant."""
        return True

    def _closed(self, marker: str | None) -> None:
        """Set the state that follows a call."""
        self._end()
        if marker is not None and marker in self.OPENERS:
            self._open(marker)
        else:
            self._state = self._content


def _name(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return ""


def _call(text: str) -> tuple[str, str] | None:
    """(name, arguments) of a whole call; None if it is none."""
    if len(text) > MAX_HELD:
        return None
    try:
        call = json.loads(text)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            return None
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            return name, arguments if arguments.strip() else "{}"
        return name, "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def more_than_fields(tail: str) -> str:
    """What follows the arguments and is no part of their object."""
    rest = tail.strip()
    if rest in ("", "}"):
        return ""
    if rest.startswith("}"):
        return rest[1:].lstrip()
    try:
        json.loads("{" + rest.removeprefix(","))
    except (ValueError, RecursionError):
        return tail
    return ""
