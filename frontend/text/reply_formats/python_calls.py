"""Tool calls as in Python, with values in JSON or in Python.

    f(city="Paris", days=3, places=['a', None], at=(48.8, 2.3))

Strings are streamed; other values are held until they end. What is no call as `f(key=value, …)` becomes raw
arguments. Nothing is evaluated: a literal is rewritten as JSON, and is a string if that is none.
"""

import json
import re
import sys
from abc import ABC, abstractmethod
from typing import ClassVar

from frontend.text.reply_formats.text import MAX_HEADER, MAX_HELD, Markers, TextParser, markers_of
from frontend.text.reply_formats.xml_calls import is_json

__all__ = ["PythonCalls"]

_NAME = re.compile(r"""[^\s(){}<>"'=,]+""")
_KEY = re.compile(r"[^\W\d][\w-]*")
_WORDS = {"True": "true", "False": "false", "None": "null"}
# What Python writes otherwise than JSON: a string, a word, and what tuples and last commas are found by.
_TOKEN = re.compile(
    r"""(?P<quote>["'])(?P<text>(?:[^"'\\]|\\.|(?!(?P=quote))["'])*+)(?P=quote)"""
    r"""|\b(?P<word>True|False|None)\b|[(){}\[\],]""",
    re.DOTALL,
)
_STOPS = {quote: re.compile(rf"{quote}|\\") for quote in ('"', "'", '"""', "'''")}
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
# What stands otherwise in a string in JSON: an escape, and characters that need one.
_OTHER = re.compile(rf"""{_ESCAPE.pattern}|["\\\x00-\x1f]""", re.DOTALL)
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?)?")
_JSON_ESCAPES = frozenset('"\\/bfnrt')
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_MAX_DEPTH = 100
"""Most brackets within one another; a value with more is a string."""


class PythonCalls(TextParser, ABC):
    """Reads the name of a call, and writes its arguments as JSON; subclasses read what is around calls."""

    CLOSERS: ClassVar[tuple[str, ...]]
    """What ends a call that has no closing bracket."""
    NAME_ENDS: ClassVar[Markers]
    """What a name ends before: the bracket of a call, and what shows that it is none."""

    _raw = ""
    """What was consumed before the name of the first call, which may be none; empty after it."""
    _head = ""
    """What was consumed of a name or key."""
    _value = ""
    """The value that is held until it ends."""
    _quote = ""
    """The quotes that end the string at hand; empty outside of strings."""
    _is_escaped = False
    """Whether the next character of a string in a held value follows a backslash."""
    _depth = 0
    """The number of open brackets in the value."""

    @abstractmethod
    def _before_call(self) -> bool:
        """After a call."""

    @abstractmethod
    def _raw_arguments(self) -> bool:
        """The rest of what is no call."""

    @abstractmethod
    def _no_call(self) -> bool:
        """After a call, text that is none."""

    def _may_be_name(self, text: str) -> bool:
        """Whether a name may begin with `text` where it stands."""
        return True

    def _accepts(self, name: str) -> bool:
        """Whether a call of this function can be meant."""
        return True

    def _name(self) -> bool:
        """In the name of a function."""
        text, marker = self._take(self.NAME_ENDS)
        self._head += text
        words = self._head.split()
        is_open = len(words) <= 1 and marker is None and self._may_be_name(self._head.strip())
        if is_open and not self._ended and len(self._head) <= MAX_HEADER:
            return False
        if marker == "(" and len(words) == 1 and _NAME.fullmatch(words[0]) and self._accepts(words[0]):
            self._start(words[0])
            self._head = self._raw = ""
            self._state = self._key
            return True
        self._buffer = (marker or "") + self._buffer
        if self._raw:
            self._reject(self._raw + self._head)
        else:
            self._write_markup(self._head)
            self._state = self._no_call
        return True

    def _key(self) -> bool:
        """Before a key, or the end of a call."""
        text, marker = self._take(markers_of(("=", ")", "\n", *self.CLOSERS)))
        self._head += text
        key = self._head.strip(" \t\r,")
        if marker == "\n" and not key:
            return True
        if marker is None and not self._ended and len(self._head) <= MAX_HEADER:
            return False
        if marker == "=" and _KEY.fullmatch(key):
            self._argue((", " if self._has_arguments else "{") + _quoted(key) + ": ")
            self._state = self._before_value
            return True
        is_end = marker in (")", *self.CLOSERS) or (marker is None and self._complete)
        if not key and is_end:
            self._buffer = (marker if marker in self.CLOSERS else "") + self._buffer
            self._end_call()
        elif marker is not None or self._complete or not self._ended:
            self._argue(self._head)
            self._buffer = (marker or "") + self._buffer
            self._state = self._raw_arguments
        else:
            return False
        return True

    def _before_value(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._head = self._value = ""
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        quote = self._buffer[0]
        if quote not in "\"'":
            self._state = self._in_value
        elif self._buffer in (quote, 2 * quote) and not self._ended:
            return False  # perhaps the first of three
        else:
            self._quote = 3 * quote if self._buffer.startswith(3 * quote) else quote
            self._buffer = self._buffer[len(self._quote) :]
            self._argue('"')
            self._state = self._in_string
        return True

    def _in_string(self) -> bool:
        """In a value that is a string."""
        end, is_whole = _string_end(self._buffer, self._quote)
        text = self._buffer[:end]
        self._buffer = self._buffer[end:]
        self._argue(_json_string(text))
        if is_whole:
            self._buffer = self._buffer[len(self._quote) :]
        elif self._ended and self._complete:
            self._argue(_json_string(self._buffer))
            self._buffer = ""
        else:
            return False
        self._argue('"')
        self._state = self._after_value
        return True

    def _in_value(self) -> bool:
        """In another value, up to what does not belong to it."""
        end = self._value_end()
        self._value += self._buffer[:end]
        self._buffer = self._buffer[end:]
        if len(self._value) > MAX_HELD:
            self._argue(self._value)
            self._state = self._raw_arguments
            return True
        if not self._buffer and not (self._ended and self._complete):
            return False
        # a search for the end of a string that has none would take quadratic time
        self._argue(_quoted(self._value.strip()) if self._quote else _json_value(self._value.strip()))
        self._state = self._after_value
        return True

    def _value_end(self) -> int:
        """Where in the buffer the value ends."""
        for at, character in enumerate(self._buffer):
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = character == "\\"
                self._quote = "" if character == self._quote else self._quote
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character == "<" or (character in ",)]}" and not self._depth):
                return at
            elif character in ")]}":
                self._depth -= 1
        return len(self._buffer)

    def _after_value(self) -> bool:
        self._buffer = self._buffer.lstrip()
        may_close = any(closer.startswith(self._buffer) for closer in self.CLOSERS)
        is_closed = self._buffer in self.CLOSERS
        if may_close and not is_closed and not self._ended:
            return False
        if may_close and not is_closed and not self._complete:
            self._buffer = ""
            return False
        self._head = ""
        is_call = not self._buffer or self._buffer.startswith((",", ")", *self.CLOSERS))
        self._state = self._key if is_call else self._raw_arguments
        return True

    def _end_call(self) -> None:
        if self._has_arguments:
            self._argue("}")
        self._end()
        self._state = self._before_call


def _string_end(text: str, quote: str) -> tuple[int, bool]:
    """Where in `text` a string ends, and whether it does; else where an escape or its end may begin."""
    at = 0
    while (found := _STOPS[quote].search(text, at)) is not None:
        at = found.start()
        if found[0] == quote:
            return at, True
        if _CUT_ESCAPE.fullmatch(text, at):
            return at, False
        escape = _ESCAPE.match(text, at)
        assert escape is not None
        at = escape.end()
    end = len(text)
    while end > at and end > len(text) + 1 - len(quote) and text[end - 1] == quote[0]:
        end -= 1
    return end, False


def _json_string(text: str) -> str:
    """The text of a string in Python or JSON as that of one in JSON, without quotes."""
    return _OTHER.sub(_json_escape, text)


def _json_escape(found: re.Match[str]) -> str:
    escape = found[0]
    if len(escape) == 1:
        return _quoted(escape)[1:-1]
    kind, digits = escape[1], escape[2:]
    if kind in _JSON_ESCAPES or (kind == "u" and digits):
        return escape
    if kind in "\n'":
        return kind.strip()
    if digits and (code := int(digits, 16)) <= sys.maxunicode:
        return json.dumps(chr(code))[1:-1]
    return _quoted(escape)[1:-1]


def _json_value(text: str) -> str:
    """A value in Python or JSON, as JSON; a string if it is neither."""
    if is_json(text):
        return text
    made = _in_json(text)
    return made if made is not None and is_json(made) else _quoted(text)


def _in_json(text: str) -> str | None:
    """`text` with its strings, words and tuples as JSON has them, and without last commas.

    None: it is nested too deeply.
    """
    parts: list[str] = []
    opened: list[list[int]] = []  # of each open bracket: its place in `parts`, and the commas in it
    comma: int | None = None  # the place of the last token, if it is one
    at = 0
    for found in _TOKEN.finditer(text):
        between, token = text[at : found.start()], found[0]
        at = found.end()
        last_comma = None if between.strip() else comma
        comma = None
        parts.append(between)
        if found["word"]:
            token = _WORDS[token]
        elif found["quote"]:
            token = f'"{_json_string(found["text"])}"'
        elif token == ",":
            comma = len(parts)
            if opened:
                opened[-1][1] += 1
        elif token in "([{":
            opened.append([len(parts), 0])
            if len(opened) > _MAX_DEPTH:
                return None
        elif opened:
            begin, commas = opened.pop()
            if last_comma is not None:
                parts[last_comma] = ""
            if token == ")" and parts[begin] == "(":
                is_empty = len(parts) == begin + 2 and not between.strip()
                parts[begin], token = ("[", "]") if commas or is_empty else ("", "")
        parts.append(token)
    return "".join([*parts, text[at:]])


def _quoted(text: str) -> str:
    return _ENCODER.encode(text)
