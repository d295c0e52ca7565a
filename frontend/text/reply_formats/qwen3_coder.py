"""Qwen3-Coder and Qwen3.5: a tag per parameter; values are not escaped.

    <tool_call>
    <function=N>
    <parameter=K>
    V
    </parameter>
    </function>
    </tool_call>

One newline on each side of a value is no part of it. `<tool_call>` and `</parameter>` may be missing.
"""

from frontend.text.reply_formats.base import CallText
from frontend.text.reply_formats.text import MAX_HEADER, Markers
from frontend.text.reply_formats.xml_calls import STRING, XmlCalls

__all__ = ["Qwen3Coder"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_NAME_ENDS = Markers(">", "\n", "<")


class Qwen3Coder(XmlCalls):
    """Parses one reply."""

    OPENERS = (_OPEN, _FUNCTION)
    MARKERS = (_OPEN, _CLOSE, _FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END)
    UNKNOWN = STRING
    PARAMETER = _PARAMETER
    BETWEEN = Markers(_PARAMETER, _FUNCTION_END, _CLOSE, _OPEN, _FUNCTION)
    VALUE_END = _PARAMETER_END
    VALUE_ENDS = Markers(
        _PARAMETER_END, *("\n" + tag for tag in (_PARAMETER_END, _PARAMETER, _FUNCTION_END, _CLOSE))
    )
    ENFORCED_ENDS = Markers(_PARAMETER_END, "\n" + _PARAMETER_END)
    CALL_TEXT = CallText(
        before_name=f"{_OPEN}\n{_FUNCTION}",
        before_arguments=">\n",
        end=f"{_FUNCTION_END}\n{_CLOSE}",
        separator="\n",
        trigger=_OPEN,
        style="qwen_xml",
        no_content=(_FUNCTION,),
    )

    def _opened(self, marker: str) -> None:
        self._head = marker
        self._state = self._expect if marker == _OPEN else self._name

    def _expect(self) -> bool:
        """After `<tool_call>`: a function begins."""
        text = self._buffer.lstrip()
        if text.startswith(_FUNCTION):
            self._head = _OPEN + self._buffer[: len(self._buffer) - len(text)] + _FUNCTION
            self._buffer = text[len(_FUNCTION) :]
            self._state = self._name
        elif not self._ended and _FUNCTION.startswith(text) and len(self._buffer) <= MAX_HEADER:
            return False
        else:
            self._reject(_OPEN)
        return True

    def _name(self) -> bool:
        text, marker = self._take(_NAME_ENDS)
        self._head += text
        if marker is None and not self._ended and len(self._head) <= MAX_HEADER:
            return False
        name = self._head.rpartition(_FUNCTION)[2].strip()
        if marker == ">" and name:
            self._start_function(name)
            self._state = self._between
        else:
            self._buffer = (marker or "") + self._buffer
            self._reject(self._head)
        return True

    def _after_function(self, marker: str) -> None:
        if marker == _FUNCTION_END:
            self._state = self._closing
        elif marker == _CLOSE:
            self._state = self._content
        else:
            self._open(marker)

    def _key(self) -> bool:
        text, marker = self._take(_NAME_ENDS)
        self._head += text
        if marker is None and not self._ended and len(self._head) <= MAX_HEADER:
            return False
        if marker == ">" and self._head.strip():
            self._start_value(self._head.strip())
            self._state = self._value_begin
        else:
            self._buffer = (marker or "") + self._buffer
            self._write_markup(_PARAMETER + self._head)
            self._state = self._between
        return True

    def _value_begin(self) -> bool:
        if not self._buffer and not self._ended:
            return False
        self._buffer = self._buffer.removeprefix("\n")
        self._state = self._in_value
        return True

    def _closing(self) -> bool:
        """After `</function>`: the end of the call."""
        text = self._buffer.lstrip()
        if text.startswith(_CLOSE):
            self._buffer = text[len(_CLOSE) :]
        elif not self._ended and _CLOSE.startswith(text) and len(self._buffer) <= MAX_HEADER:
            return False
        self._state = self._content
        return True
