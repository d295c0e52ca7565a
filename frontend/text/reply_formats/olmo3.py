r"""OLMo 3: calls as in Python, with values in JSON or in Python.

    <function_calls>f(city="Paris", days=3)
    g(yes=True, list=['a', None])</function_calls>

Strings are streamed; other values are held until they end.
"""

import json
import re
import sys

from frontend.text.reply_formats.text import MAX_HEADER, MAX_HELD, Markers, TextParser
from frontend.text.reply_formats.xml_calls import is_json

__all__ = ["Olmo3"]

_OPEN = "<function_calls>"
_CLOSE = "</function_calls>"
_NAME_ENDS = Markers("(", "\n", _CLOSE, _OPEN)
_LINE_ENDS = Markers("\n", _CLOSE, _OPEN)
_KEY_ENDS = Markers("=", ")", "\n", _CLOSE)
_NAME = re.compile(r"""[^\s(){}<>"'=,]+""")
_KEY = re.compile(r"[^\W\d][\w-]*")
_WORDS = {"True": "true", "False": "false", "None": "null"}
# A string, or a word that Python writes otherwise than JSON.
_LITERAL = re.compile(
    r"""(?P<quote>["'])(?P<text>(?:[^"'\\]|\\.|(?!(?P=quote))["'])*+)(?P=quote)|\b(?P<word>True|False|None)\b""",
    re.DOTALL,
)
_STOPS = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?)?")
_JSON_ESCAPES = frozenset('"\\/bfnrt')


class Olmo3(TextParser):
    """Parses one reply."""

    OPENERS = (_OPEN,)
    MARKERS = (_OPEN, _CLOSE)

    _head = ""
    """What was consumed of a name or key."""
    _raw = ""
    """What was consumed of a call whose name is not known."""
    _value = ""
    """The value that is held until it ends."""
    _quote = ""
    """The quote that ends the string at hand; empty outside of strings."""
    _is_escaped = False
    """Whether the next character of such a string follows a backslash."""
    _depth = 0
    """The number of open brackets in the value."""

    def _opened(self, marker: str) -> None:
        self._raw = marker
        self._state = self._before_call

    def _before_call(self) -> bool:
        text = self._buffer.lstrip()
        if self._raw:  # before the first call, which may be none
            self._raw += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        marker = next((marker for marker in self.MARKERS if text.startswith(marker)), None)
        if marker is not None and self._raw:
            self._reject(self._raw)
            return True
        if marker is not None:
            self._buffer = text[len(marker) :]
            self._state = self._content if marker == _CLOSE else self._before_call
            return True
        may_begin = any(marker.startswith(text) for marker in self.MARKERS)
        if may_begin and not self._ended and len(self._raw) <= MAX_HEADER:
            return False
        self._head = ""
        self._state = self._name
        return True

    def _name(self) -> bool:
        text, marker = self._take(_NAME_ENDS)
        self._head += text
        words = self._head.split()
        if len(words) <= 1 and marker is None and not self._ended and len(self._head) <= MAX_HEADER:
            return False
        if marker == "(" and len(words) == 1 and _NAME.fullmatch(words[0]):
            self._start(words[0])
            self._head = self._raw = ""
            self._state = self._key
            return True
        self._buffer = (marker or "") + self._buffer
        if self._raw:
            self._reject(self._raw + self._head)
        else:
            self._write_markup(self._head)
            self._state = self._other_line
        return True

    def _other_line(self) -> bool:
        """A line after a call, which is none."""
        text, marker = self._take(_LINE_ENDS)
        self._write_markup(text)
        if marker is None:
            return False
        self._buffer = marker + self._buffer
        self._state = self._before_call
        return True

    def _key(self) -> bool:
        """Before a key, or the end of a call."""
        text, marker = self._take(_KEY_ENDS)
        self._head += text
        key = self._head.strip(" \t,")
        if marker == "\n" and not key:
            return True
        if marker is None and not self._ended and len(self._head) <= MAX_HEADER:
            return False
        if marker == "=" and _KEY.fullmatch(key):
            self._argue((", " if self._has_arguments else "{") + _quoted(key) + ": ")
            self._state = self._before_value
            return True
        is_end = marker in (")", _CLOSE) or (marker is None and self._complete)
        if not key and is_end:
            self._buffer = (_CLOSE if marker == _CLOSE else "") + self._buffer
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
        if self._buffer[0] in "\"'":
            self._quote = self._buffer[0]
            self._buffer = self._buffer[1:]
            self._argue('"')
            self._state = self._in_string
        else:
            self._quote = ""
            self._state = self._in_value
        return True

    def _in_string(self) -> bool:
        """In a value that is a string."""
        end, is_whole = _string_end(self._buffer, self._quote)
        text = self._buffer[:end]
        self._buffer = self._buffer[end:]
        self._argue(_json_string(text))
        if is_whole:
            self._buffer = self._buffer[1:]
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
        self._argue(_json_value(self._value.strip()))
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
            elif character in "[{":
                self._depth += 1
            elif character in "<)" or (character in ",]}" and not self._depth):
                return at
            elif character in "]}":
                self._depth -= 1
        return len(self._buffer)

    def _after_value(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if _CLOSE.startswith(self._buffer) and not self._ended:
            return False
        is_cut = self._ended and not self._complete
        if is_cut and _CLOSE.startswith(self._buffer):
            self._buffer = ""
            return False
        self._head = ""
        is_call = not self._buffer or self._buffer.startswith((",", ")", _CLOSE))
        self._state = self._key if is_call else self._raw_arguments
        return True

    def _raw_arguments(self) -> bool:
        """The rest of a line that is no call."""
        text, marker = self._take(_LINE_ENDS)
        self._argue(text)
        if marker is None:
            return False
        self._end()
        self._buffer = marker + self._buffer
        self._state = self._before_call
        return True

    def _end_call(self) -> None:
        if self._has_arguments:
            self._argue("}")
        self._end()
        self._state = self._before_call


def _string_end(text: str, quote: str) -> tuple[int, bool]:
    """Where in `text` a string ends, and whether it does; else where an escape begins that is cut off."""
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
    return len(text), False


def _json_string(text: str) -> str:
    """The text of a string in Python or JSON as that of one in JSON, without quotes."""
    parts, at = [], 0
    for found in _ESCAPE.finditer(text):
        parts += [_quoted(text[at : found.start()])[1:-1], _json_escape(found[0])]
        at = found.end()
    return "".join([*parts, _quoted(text[at:])[1:-1]])


def _json_escape(escape: str) -> str:
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

    def in_json(found: re.Match[str]) -> str:
        return _WORDS[found["word"]] if found["word"] else f'"{_json_string(found["text"])}"'

    made = _LITERAL.sub(in_json, text)
    return made if is_json(made) else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
