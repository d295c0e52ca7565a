"""Kimi K2: marker tokens around an id, which has the name, and JSON.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.N:0<|tool_call_argument_begin|>{…}
    <|tool_call_end|><|tool_calls_section_end|>

The ids of the model are returned, since the template prints them in the next prompt.
"""

from frontend.text.reply_formats.base import CallText
from frontend.text.reply_formats.sections import SectionCalls
from frontend.text.reply_formats.text import Markers

__all__ = ["KimiK2"]

_CALLS = "<|tool_calls_section_begin|>"
_CALLS_END = "<|tool_calls_section_end|>"
_CALL = "<|tool_call_begin|>"
_CALL_END = "<|tool_call_end|>"
_SEPARATOR = "<|tool_call_argument_begin|>"
_NAMESPACE = "functions."


class KimiK2(SectionCalls):
    """Parses one reply."""

    OPENERS = (_CALLS, _CALL)
    MARKERS = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)
    CALL = _CALL
    SEPARATOR = _SEPARATOR
    CALL_END = _CALL_END
    SECTION_END = _CALLS_END
    BETWEEN = Markers(_CALL, _CALLS_END)
    HEADER_ENDS = Markers(_SEPARATOR, _CALL_END, _CALL, _CALLS_END)
    ARGUMENT_ENDS = Markers(_CALL_END, _CALL, _CALLS_END)
    CALL_TEXT = CallText(
        before_name=f"{_CALL}{_NAMESPACE}",
        number=":[0-9]{1,4}",
        before_arguments=_SEPARATOR,
        end=_CALL_END,
        separator="",
        trigger=_CALLS,
        section=(_CALLS, _CALLS_END),
        no_content=(_CALL,),
    )

    def _begin(self, head: str) -> bool:
        call_id = head.strip()
        path, colon, number = call_id.rpartition(":")
        name = (path if colon and number.isdigit() else call_id).removeprefix(_NAMESPACE)
        if not name:
            return False
        self._start(name, call_id)
        self._state = self._before_arguments
        return True
