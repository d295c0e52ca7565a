"""Llama 4, and models of Llama 3.2 such as ToolACE: a list of calls as in Python, perhaps after a tag.

    <|python_start|>[f(city="Paris", days=3), g(yes=True)]<|python_end|>

The tags are optional, so a reply that begins with a bracket may be calls. It is if the first one names an
offered function; any other list is content.
"""

from frontend.text.reply_formats.base import CallText
from frontend.text.reply_formats.python_calls import PythonCalls
from frontend.text.reply_formats.text import MAX_HEADER, Markers

__all__ = ["Pythonic"]

_OPENERS = ("<|python_start|>", "<|python_tag|>")
_END = "<|python_end|>"
_MARKERS = (*_OPENERS, _END)
_RAW_ENDS = Markers("),", ")]", "\n", *_MARKERS)
_SPACES = " \t\r\n"


class Pythonic(PythonCalls):
    """Parses one reply."""

    OPENERS = _OPENERS
    DRAFT_OPENERS = OPENERS
    MARKERS = _MARKERS
    CLOSERS = ("]", _END)
    NAME_ENDS = Markers("(", "\n", "]", *_MARKERS)
    CALL_TEXT = CallText(
        before_name="",
        before_arguments="(",
        end=")",
        separator=", ",
        trigger="",
        section=("[", "]"),
        style="python",
        no_content=_OPENERS,
        other_begin=r"""[^\[\s]|\[["'\[\]{}()<>=,]""",
    )
    _is_marked = False
    """Whether a tag began the list."""

    def _first_content(self) -> bool:
        text = self._buffer.lstrip()
        if self._openers is not None and not text and not self._ended and len(self._buffer) <= MAX_HEADER:
            return False
        if self._openers is not None and text.startswith("["):
            self._open("")
        else:
            self._state = self._content
        return True

    def _opened(self, marker: str) -> None:
        self._raw = marker
        self._is_marked = bool(marker)
        self._state = self._before_list

    def _before_list(self) -> bool:
        text = self._buffer.lstrip()
        if not text and not self._ended and len(self._buffer) <= MAX_HEADER:
            return False
        self._raw += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        if not text.startswith("["):
            self._reject(self._raw)
            return True
        self._raw += "["
        self._buffer = text[1:]
        self._state = self._before_call
        return True

    def _before_call(self) -> bool:
        text = self._buffer.lstrip(_SPACES if self._raw else _SPACES + ",")
        if self._raw:  # before the first call, which may be none
            self._raw += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        marker = next((end for end in ("]", *_MARKERS) if text.startswith(end)), None)
        may_end = any(end.startswith(text) for end in _MARKERS)
        if marker is not None and not self._raw:
            self._buffer = text[marker == "]" :]
            self._state = self._after_list
        elif marker is None and may_end and not self._ended and len(self._raw) <= MAX_HEADER:
            return False
        else:
            self._head = ""
            self._state = self._name
        return True

    @property
    def _is_sure(self) -> bool:
        """Whether what follows can only be calls."""
        return self._is_marked or not self._raw

    def _may_be_name(self, text: str) -> bool:
        return self._is_sure or any(name.startswith(text) for name in self._options.tools or ())

    def _accepts(self, name: str) -> bool:
        return self._is_sure or name in (self._options.tools or ())

    def _no_call(self) -> bool:
        self._state = self._content
        return True

    def _raw_arguments(self) -> bool:
        text, marker = self._take(_RAW_ENDS)
        self._argue(text)
        if marker is None:
            return False
        self._end()
        self._buffer = marker.removeprefix(")") + self._buffer
        self._state = self._before_call
        return True

    def _after_list(self) -> bool:
        """After a list, which a tag may end, or another list follow."""
        text = self._buffer.lstrip()
        marker = next((marker for marker in _MARKERS if text.startswith(marker)), None)
        if marker is None and any(each.startswith(text) for each in _MARKERS):
            if not self._ended and len(self._buffer) <= MAX_HEADER:
                return False
            if self._ended and not self._complete:
                self._buffer = ""
        if marker == _END:
            self._buffer = text[len(_END) :]
            self._state = self._content
        elif text.startswith("["):
            self._buffer = text
            self._open("")
        else:
            self._state = self._content
        return True
