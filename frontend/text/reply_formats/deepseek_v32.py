"""DeepSeek V3.2 and V4: a tag per parameter, which says whether its value is a string or JSON.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="N">
    <｜DSML｜parameter name="K" string="true">V</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

Two newlines before the section belong to it. In V4 its name is tool_calls.
"""

import re

from frontend.text.reply_formats.base import CallText
from frontend.text.reply_formats.text import MAX_HEADER, Markers
from frontend.text.reply_formats.xml_calls import ANY, STRING, XmlCalls, is_json

__all__ = ["DeepSeekV4", "DeepSeekV32"]

_TOKEN = "｜DSML｜"
_INVOKE = f"<{_TOKEN}invoke name="
_INVOKE_END = f"</{_TOKEN}invoke>"
_PARAMETER = f"<{_TOKEN}parameter name="
_PARAMETER_END = f"</{_TOKEN}parameter>"
_HEAD_ENDS = Markers('">', "\n", "<")
_NAME = re.compile(r'"(.+)')
_KEY = re.compile(r'"(.+?)(?:" string="(true|false))?')
_JSON = ANY - STRING


class _Section:
    """What depends on the name of the section."""

    def __init__(self, name: str):
        begin = f"<{_TOKEN}{name}>"
        end = f"</{_TOKEN}{name}>"
        self.openers = (begin, f"\n\n{begin}", _INVOKE)
        self.markers = (_TOKEN, begin, end, _INVOKE, _INVOKE_END, _PARAMETER, _PARAMETER_END)
        self.inside = Markers(_INVOKE, end)
        self.between = Markers(_PARAMETER, _INVOKE_END, end, _INVOKE)
        self.value_ends = Markers(_PARAMETER_END, _INVOKE_END, end)
        self.call_text = CallText(
            before_name=f'\n{_INVOKE}"',
            before_arguments='">\n',
            end=_INVOKE_END,
            separator="",
            trigger=begin,
            section=(begin, f"\n{end}"),
            style="deepseek_xml",
            no_content=(_INVOKE,),
        )


_FUNCTION_CALLS = _Section("function_calls")
_TOOL_CALLS = _Section("tool_calls")


class DeepSeekV32(XmlCalls):
    """Parses one reply."""

    OPENERS = _FUNCTION_CALLS.openers
    DRAFT_OPENERS = OPENERS[:2]
    MARKERS = _FUNCTION_CALLS.markers
    UNKNOWN = ANY
    PARAMETER = _PARAMETER
    IN_SECTION = _FUNCTION_CALLS.inside
    BETWEEN = _FUNCTION_CALLS.between
    VALUE_END = _PARAMETER_END
    VALUE_ENDS = _FUNCTION_CALLS.value_ends
    ENFORCED_ENDS = Markers(_PARAMETER_END)
    CALL_TEXT = _FUNCTION_CALLS.call_text

    _gap = ""
    """White space between two calls, which is content only before other text."""
    _stated: str | None = None
    """The attribute `string` of the current parameter."""

    def _opened(self, marker: str) -> None:
        self._head = ""
        self._state = self._name if marker == _INVOKE else self._section

    def _section(self) -> bool:
        """Between two calls."""
        text, marker = self._take(self.IN_SECTION)
        self._gap += text
        if kept := self._gap.rstrip():
            self._write(kept)
            self._gap = self._gap[len(kept) :]
        if marker is None:
            return False
        self._gap = ""
        if marker == _INVOKE:
            self._open(marker)
        else:
            self._state = self._content
        return True

    def _name(self) -> bool:
        text, marker = self._take(_HEAD_ENDS)
        self._head += text
        if marker is None and not self._ended and len(self._head) <= MAX_HEADER:
            return False
        found = _NAME.fullmatch(self._head)
        if marker == '">' and found is not None:
            self._start_function(found[1])
            self._state = self._between
        else:
            self._buffer = (marker or "") + self._buffer
            self._reject(_INVOKE + self._head)
        return True

    def _after_function(self, marker: str) -> None:
        if marker == _INVOKE:
            self._open(marker)
        else:
            self._state = self._section if marker == _INVOKE_END else self._content

    def _key(self) -> bool:
        text, marker = self._take(_HEAD_ENDS)
        self._head += text
        if marker is None and not self._ended and len(self._head) <= MAX_HEADER:
            return False
        found = _KEY.fullmatch(self._head)
        if marker == '">' and found is not None:
            self._stated = found[2]
            self._start_value(found[1])
            self._state = self._in_value
        else:
            self._buffer = (marker or "") + self._buffer
            self._write_markup(_PARAMETER + self._head)
            self._state = self._between
        return True

    def _end_value(self) -> None:
        if self._stated == "false" and self._value is not None and is_json(self._value):
            self._argue(self._value.strip())
        else:
            super()._end_value()

    def _parameter_kinds(self, parameter: str) -> frozenset[str]:
        """The model states the type itself; without the attribute the schema does."""
        if self._stated is None:
            return super()._parameter_kinds(parameter)
        return STRING if self._stated == "true" else _JSON


class DeepSeekV4(DeepSeekV32):
    """Parses one reply of DeepSeek-V4."""

    OPENERS = _TOOL_CALLS.openers
    DRAFT_OPENERS = OPENERS[:2]
    MARKERS = _TOOL_CALLS.markers
    IN_SECTION = _TOOL_CALLS.inside
    BETWEEN = _TOOL_CALLS.between
    VALUE_ENDS = _TOOL_CALLS.value_ends
    CALL_TEXT = _TOOL_CALLS.call_text
