"""DeepSeek V3.2: a tag per parameter, which says whether its value is a string or JSON.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="N">
    <｜DSML｜parameter name="K" string="true">V</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

Two newlines before the section belong to it.
"""

import re

from frontend.text.reply_formats.base import CallText
from frontend.text.reply_formats.text import MAX_HEADER, Markers
from frontend.text.reply_formats.xml_calls import ANY, STRING, XmlCalls, is_json

__all__ = ["DeepSeekV32"]

_TOKEN = "｜DSML｜"
_SECTION = f"<{_TOKEN}function_calls>"
_SECTION_END = f"</{_TOKEN}function_calls>"
_INVOKE = f"<{_TOKEN}invoke name="
_INVOKE_END = f"</{_TOKEN}invoke>"
_PARAMETER = f"<{_TOKEN}parameter name="
_PARAMETER_END = f"</{_TOKEN}parameter>"
_HEAD_ENDS = Markers('">', "\n", "<")
_IN_SECTION = Markers(_INVOKE, _SECTION_END)
_NAME = re.compile(r'"(.+)')
_KEY = re.compile(r'"(.+?)(?:" string="(true|false))?')
_JSON = ANY - STRING


class DeepSeekV32(XmlCalls):
    """Parses one reply."""

    OPENERS = (_SECTION, f"\n\n{_SECTION}", _INVOKE)
    DRAFT_OPENERS = OPENERS[:2]
    MARKERS = (_TOKEN, _SECTION, _SECTION_END, _INVOKE, _INVOKE_END, _PARAMETER, _PARAMETER_END)
    UNKNOWN = ANY
    PARAMETER = _PARAMETER
    BETWEEN = Markers(_PARAMETER, _INVOKE_END, _SECTION_END, _INVOKE)
    VALUE_END = _PARAMETER_END
    VALUE_ENDS = Markers(_PARAMETER_END, _INVOKE_END, _SECTION_END)
    ENFORCED_ENDS = Markers(_PARAMETER_END)
    CALL_TEXT = CallText(
        before_name=f'\n{_INVOKE}"',
        before_arguments='">\n',
        end=_INVOKE_END,
        separator="",
        trigger=_SECTION,
        section=(_SECTION, f"\n{_SECTION_END}"),
        style="deepseek_xml",
        no_content=(_INVOKE,),
    )

    _gap = ""
    """White space between two calls, which is content only before other text."""
    _stated: str | None = None
    """The attribute `string` of the current parameter."""

    def _opened(self, marker: str) -> None:
        self._head = ""
        self._state = self._name if marker == _INVOKE else self._section

    def _section(self) -> bool:
        """Between two calls."""
        text, marker = self._take(_IN_SECTION)
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
