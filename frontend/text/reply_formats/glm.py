"""GLM 4.5 and later: a tag pair per parameter; strings in plain text, other values as JSON.

    <tool_call>N
    <arg_key>K</arg_key>
    <arg_value>V</arg_value>
    </tool_call>

Newer models write no newlines between the tags.
"""

from frontend.text.reply_formats.base import CallText
from frontend.text.reply_formats.text import MAX_HEADER, Markers
from frontend.text.reply_formats.xml_calls import ANY, XmlCalls

__all__ = ["Glm"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_KEY = "<arg_key>"
_KEY_END = "</arg_key>"
_VALUE = "<arg_value>"
_VALUE_END = "</arg_value>"
_NAME_ENDS = Markers("\n", _KEY, _CLOSE, _OPEN)
_KEY_ENDS = Markers(_KEY_END, _VALUE, _KEY, _CLOSE)
_VALUE_BEGINS = Markers(_VALUE, _KEY, _CLOSE)
_NO_NAME = frozenset("{}<>\"'")


class Glm(XmlCalls):
    """Parses one reply."""

    OPENERS = (_OPEN,)
    MARKERS = (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)
    UNKNOWN = ANY
    PARAMETER = _KEY
    BETWEEN = Markers(_KEY, _CLOSE, _OPEN)
    VALUE_END = _VALUE_END
    VALUE_ENDS = Markers(_VALUE_END, _CLOSE)
    ENFORCED_ENDS = Markers(_VALUE_END)
    CALL_TEXT = CallText(
        before_name=_OPEN,
        before_arguments="",
        end=_CLOSE,
        separator="\n",
        trigger=_OPEN,
        style="glm_xml",
    )

    _parameter = ""

    def _opened(self, marker: str) -> None:
        self._head = ""
        self._state = self._name

    def _name(self) -> bool:
        text, marker = self._take(_NAME_ENDS)
        self._head += text
        name = self._head.strip()
        if marker is None and not self._ended and len(self._head) <= MAX_HEADER:
            return False
        if marker == "\n" and not name:
            self._head += marker
            return True
        if marker in ("\n", _KEY, _CLOSE) and name and _NO_NAME.isdisjoint(name) and len(name.split()) == 1:
            self._start_function(name)
            self._buffer = (marker or "") + self._buffer
            self._state = self._between
        else:
            if marker == _OPEN:
                self._buffer = marker + self._buffer
                marker = ""
            self._reject(_OPEN + self._head + (marker or ""))
        return True

    def _after_function(self, marker: str) -> None:
        if marker == _OPEN:
            self._open(marker)
        else:
            self._state = self._content

    def _key(self) -> bool:
        text, marker = self._take(_KEY_ENDS)
        self._head += text
        if marker is None and not self._ended and len(self._head) <= MAX_HEADER:
            return False
        self._parameter = self._head.strip()
        if marker == _KEY_END and self._parameter:
            self._state = self._value_tag
        elif marker == _VALUE and self._parameter:
            self._begin_value()
        else:
            self._not_a_parameter(_KEY + self._head, marker)
        return True

    def _value_tag(self) -> bool:
        """Between a key and its value."""
        text, marker = self._take(_VALUE_BEGINS)
        self._write(text)
        if marker == _VALUE:
            self._begin_value()
            return True
        if marker is None and not self._ended:
            return False
        self._not_a_parameter(_KEY + self._parameter + _KEY_END, marker)
        return True

    def _begin_value(self) -> None:
        self._start_value(self._parameter)
        self._state = self._in_value

    def _not_a_parameter(self, raw: str, marker: str | None) -> None:
        self._write_markup(raw)
        self._buffer = (marker or "") + self._buffer
        self._state = self._between
