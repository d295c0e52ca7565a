r"""OLMo 3: calls as in Python, each on a line.

<function_calls>f(city="Paris", days=3)
g(yes=True, list=['a', None])</function_calls>
"""

from frontend.text.reply_formats.base import CallText
from frontend.text.reply_formats.python_calls import PythonCalls
from frontend.text.reply_formats.text import MAX_HEADER, Markers

__all__ = ["Olmo3"]

_OPEN = "<function_calls>"
_CLOSE = "</function_calls>"
_LINE_ENDS = Markers("\n", _CLOSE, _OPEN)


class Olmo3(PythonCalls):
    """Parses one reply."""

    OPENERS = (_OPEN,)
    MARKERS = (_OPEN, _CLOSE)
    CLOSERS = (_CLOSE,)
    NAME_ENDS = Markers("(", "\n", _CLOSE, _OPEN)
    CALL_TEXT = CallText("", "(", ")", "\n", _OPEN, section=(_OPEN, _CLOSE), style="python")

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

    def _no_call(self) -> bool:
        """A line after a call, which is none."""
        text, marker = self._take(_LINE_ENDS)
        self._write_markup(text)
        if marker is None:
            return False
        self._buffer = marker + self._buffer
        self._state = self._before_call
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
