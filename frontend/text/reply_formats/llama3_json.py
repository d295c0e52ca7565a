"""Llama 3.1 and 3.2: a JSON object, perhaps after a tag, or several with semicolons between them.

    <|python_tag|>{"name": "f", "parameters": {…}}; {"name": "g", "parameters": {…}}

The tag is optional, so a reply that begins with a brace may be a call. It is one if it names an offered
function; any other object is content.
"""

import re

from frontend.text.reply_formats.base import CallText
from frontend.text.reply_formats.json_calls import JsonCalls
from frontend.text.reply_formats.text import MAX_HEADER, Markers

__all__ = ["Llama3Json"]

_TAG = "<|python_tag|>"
_KEYS = ("name", "type", "id", "parameters", "arguments")
_BEGIN = re.compile(r'\s*+(?:\{\s*+(?:"(?P<key>[^"\\]{0,16}+)(?P<end>")?.*)?)?', re.DOTALL)
_NEXT = re.compile(r"\s*+\}?+[\s;]*+")


class Llama3Json(JsonCalls):
    """Parses one reply."""

    OPENERS = (_TAG,)
    MARKERS = (_TAG,)
    CLOSERS = Markers(_TAG)
    CALL_TEXT = CallText('{"name": "', '", "parameters": ', "}", "; ", '{"name": "')

    def _first_content(self) -> bool:
        text = self._buffer.lstrip()
        if self._openers is not None and not text and not self._ended and len(self._buffer) <= MAX_HEADER:
            return False
        if self._openers is not None and text.startswith("{"):
            self._open("")
        else:
            self._state = self._content
        return True

    def _header(self) -> bool:
        return super()._header() if self._may_be_call() else self._give_up()

    def _may_be_call(self) -> bool:
        found = _BEGIN.fullmatch(self._buffer)
        if found is None:
            return False
        key = found["key"]
        if key is None or found["end"]:
            return key is None or key in _KEYS
        return any(known.startswith(key) for known in _KEYS)

    def _accepts(self, name: str) -> bool:
        return self._options.tools is not None and name in self._options.tools

    def _tail(self) -> bool:
        found = _NEXT.match(self._buffer)
        assert found is not None
        rest = self._buffer[found.end() :]
        if not rest and not self._ended and len(self._buffer) <= MAX_HEADER:
            return False
        self._end()
        self._buffer = rest
        if rest.startswith("{"):
            self._open("")
        else:
            self._state = self._content
        return True
