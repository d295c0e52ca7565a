"""DeepSeek V3, V3.1 and R1: marker tokens around a name and JSON.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>N<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3 and R1 write `function` before the separator, and after it the name and the arguments in a code block.
"""

from dataclasses import replace

from frontend.text.reply_formats.base import CallText
from frontend.text.reply_formats.sections import SectionCalls
from frontend.text.reply_formats.text import MAX_HEADER, Markers

__all__ = ["DeepSeek", "DeepSeekV3"]

_CALLS = "<｜tool▁calls▁begin｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_TYPE = "function"
_FENCE = "```json"
_V31 = CallText(
    before_name=_CALL,
    before_arguments=_SEPARATOR,
    end=_CALL_END,
    separator="",
    trigger=_CALLS,
    section=(_CALLS, _CALLS_END),
    no_content=(_CALL,),
)


class DeepSeek(SectionCalls):
    """Parses one reply. Calls can be enforced in the shape of V3.1."""

    CALL_TEXT = _V31
    OPENERS = (_CALLS, _CALL)
    MARKERS = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)
    CALL = _CALL
    SEPARATOR = _SEPARATOR
    CALL_END = _CALL_END
    SECTION_END = _CALLS_END
    BETWEEN = Markers(_CALL, _CALLS_END)
    HEADER_ENDS = Markers(_SEPARATOR, _CALL_END, _CALL, _CALLS_END)
    ARGUMENT_ENDS = Markers(_CALL_END, "\n```" + _CALL_END, "```" + _CALL_END, _CALL, _CALLS_END)
    _FENCES = Markers(_FENCE, _CALL_END, _CALL, _CALLS_END)

    def _begin(self, head: str) -> bool:
        name = head.strip()
        if name == _TYPE:
            self._head = ""
            self._raw = self._raw + head + _SEPARATOR
            self._state = self._after_type
        elif name:
            self._start(name)
            self._state = self._before_arguments
        return bool(name)

    def _after_type(self) -> bool:
        """A name and a code block (V3), or the arguments of a function that is called `function` (V3.1)."""
        if not self._buffer.lstrip() and not self._ended and len(self._buffer) <= MAX_HEADER:
            return False
        if self._buffer.lstrip().startswith("{"):
            self._start(_TYPE)
            self._state = self._before_arguments
        else:
            self._state = self._fenced
        return True

    def _fenced(self) -> bool:
        text, marker = self._take(self._FENCES)
        self._head += text
        name = self._head.strip()
        if marker == _FENCE and name:
            self._start(name)
            self._state = self._before_arguments
            return True
        if marker is None and not self._ended and len(self._head) <= MAX_HEADER:
            return False
        if marker == _CALL:
            self._buffer = marker + self._buffer
            marker = ""
        self._reject(self._raw + self._head + (marker or ""))
        return True


class DeepSeekV3(DeepSeek):
    """Parses one reply of V3 or R1."""

    CALL_TEXT = replace(
        _V31,
        before_name=f"{_CALL}{_TYPE}{_SEPARATOR}",
        before_arguments=f"\n{_FENCE}\n",
        end=f"\n```{_CALL_END}",
        separator="\n",
    )
