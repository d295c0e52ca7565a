"""MiniMax-M2: calls in a section, with a tag per parameter; values are not escaped.

    <minimax:tool_call>
    <invoke name="N">
    <parameter name="K">V</parameter>
    </invoke>
    </minimax:tool_call>

A section may have several calls. `</parameter>` may be missing before the next tag on a line of its own.
"""

from frontend.text.reply_formats.base import CallText
from frontend.text.reply_formats.text import MAX_HEADER, Markers
from frontend.text.reply_formats.xml_calls import STRING, XmlCalls

__all__ = ["MiniMaxM2"]

_OPEN = "<minimax:tool_call>"
_CLOSE = "</minimax:tool_call>"
_INVOKE = '<invoke name="'
_INVOKE_END = "</invoke>"
_PARAMETER = '<parameter name="'
_PARAMETER_END = "</parameter>"
_NAME_ENDS = Markers('"', "\n", "<")
_CALLS = Markers(_INVOKE, _CLOSE, _OPEN)


class MiniMaxM2(XmlCalls):
    """Parses one reply."""

    OPENERS = (_OPEN,)
    MARKERS = (_OPEN, _CLOSE, _INVOKE, _INVOKE_END, _PARAMETER, _PARAMETER_END)
    UNKNOWN = STRING
    PARAMETER = _PARAMETER
    BETWEEN = Markers(_PARAMETER, _INVOKE_END, _CLOSE, _OPEN, _INVOKE)
    VALUE_END = _PARAMETER_END
    VALUE_ENDS = Markers(_PARAMETER_END, *("\n" + tag for tag in (_PARAMETER, _INVOKE_END, _CLOSE)))
    ENFORCED_ENDS = Markers(_PARAMETER_END)
    CALL_TEXT = CallText(
        before_name=_INVOKE,
        before_arguments='">\n',
        end=_INVOKE_END,
        separator="\n",
        trigger=_OPEN,
        section=(f"{_OPEN}\n", f"\n{_CLOSE}"),
        style="minimax_xml",
    )

    _space = ""
    """White space before a tag of the section: content only if the tag is."""

    def _opened(self, marker: str) -> None:
        self._head = ""
        if marker == _INVOKE:
            self._state = self._name
        else:
            self._begin_section()

    def _begin_section(self) -> None:
        self._space = ""
        self._state = self._before_call

    def _before_call(self) -> bool:
        text = self._buffer.lstrip()
        self._space = (self._space + self._buffer[: len(self._buffer) - len(text)])[:MAX_HEADER]
        self._buffer = text
        if not text:
            return False
        self._state = self._section
        return True

    def _section(self) -> bool:
        """Between calls."""
        text, marker = self._take(_CALLS)
        if text:
            self._write(self._space + text)
            self._space = ""
        if marker is None:
            return False
        if marker == _CLOSE:
            self._state = self._content
        else:
            self._open(marker)
        return True

    def _name(self) -> bool:
        name = self._quoted()
        if name is None:
            return False
        if name:
            self._start_function(name)
            self._state = self._between
        else:
            self._reject(self._space + _INVOKE + self._head)
        return True

    def _quoted(self) -> str | None:
        """A name up to the end of its tag; None: more is to come; empty: `_head` is no name."""
        if not self._head.endswith('"'):
            text, marker = self._take(_NAME_ENDS)
            self._head += text
            if marker is None and not self._ended and len(self._head) <= MAX_HEADER:
                return None
            if marker != '"':
                self._buffer = (marker or "") + self._buffer
                return ""
            self._head += marker
        found = self._skip(">")
        if not found:
            return None if found is None else ""
        name = self._head[:-1].strip()
        self._head += ">"
        return name

    def _after_function(self, marker: str) -> None:
        if marker == _INVOKE_END:
            self._begin_section()
        elif marker == _CLOSE:
            self._state = self._content
        else:
            self._open(marker)

    def _key(self) -> bool:
        key = self._quoted()
        if key is None:
            return False
        if key:
            self._start_value(key)
            self._state = self._in_value
        else:
            self._write_markup(_PARAMETER + self._head)
            self._state = self._between
        return True
