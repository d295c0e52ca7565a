"""Mistral: a marker before each call, and one before its arguments; older models write one list of all calls.

    [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{…}[TOOL_CALLS]g[ARGS]{…}
    [TOOL_CALLS] [{"name": "f", "arguments": {…}}, {"name": "g", "arguments": {…}}]

The second and third marker may be missing. Templates take ids of nine letters and digits only.
"""

from frontend.text.reply_formats.base import CallText
from frontend.text.reply_formats.json_calls import JsonSpan
from frontend.text.reply_formats.json_lists import JsonLists
from frontend.text.reply_formats.text import MAX_HEADER, Markers

__all__ = ["ARGUMENTS", "Mistral", "MistralLists"]

_CALL = "[TOOL_CALLS]"
_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
_ID_LENGTH = 9
_NAME_ENDS = Markers(_ID, ARGUMENTS, "{", _CALL)
_ID_ENDS = Markers(ARGUMENTS, "{", _CALL)
_NO_NAME = frozenset("{}<>\"'")


class Mistral(JsonLists):
    """Parses one reply. Calls can be enforced in the newer form."""

    OPENERS = (_CALL,)
    MARKERS = (_CALL, _ID, ARGUMENTS)
    CLOSERS = Markers(_CALL)
    CALL_TEXT = CallText(before_name=_CALL, before_arguments=ARGUMENTS, end="", separator="", trigger=_CALL)

    _head = ""
    """What was read of a call before its arguments."""
    _name = ""
    _named = False
    """Whether the current call has the newer form."""

    def _opened(self, marker: str) -> None:
        super()._opened(marker)
        self._head = ""
        self._named = False

    def _list(self) -> bool:
        text = self._buffer.lstrip()
        if not text or text.startswith(("[", "{")):
            return super()._list()
        self._state = self._before_name_ends
        return True

    def _before_name_ends(self) -> bool:
        text, marker = self._take(_NAME_ENDS)
        self._head += text
        words = self._head.split()
        if len(words) <= 1 and marker is None and not self._ended and len(self._head) <= MAX_HEADER:
            return False
        if marker in (None, _CALL) or len(words) != 1 or not _NO_NAME.isdisjoint(words[0]):
            self._buffer = (marker or "") + self._buffer
            self._reject(_CALL + self._head)
            return True
        self._name = words[0]
        if marker == _ID:
            self._head += marker
            self._state = self._before_id_ends
        else:
            self._begin(marker, "")
        return True

    def _before_id_ends(self) -> bool:
        text, marker = self._take(_ID_ENDS)
        self._head += text
        if marker is None and not self._ended and len(self._head) <= MAX_HEADER:
            return False
        if marker in (None, _CALL):
            self._buffer = (marker or "") + self._buffer
            self._reject(_CALL + self._head)
        else:
            self._begin(marker, self._head.partition(_ID)[2].strip())
        return True

    def _begin(self, marker: str | None, call_id: str) -> None:
        """Start a call, whose arguments follow `marker`, or begin with it."""
        is_usable = len(call_id) == _ID_LENGTH and call_id.isascii() and call_id.isalnum()
        self._start(self._name, call_id if is_usable else "")
        if marker == "{":
            self._buffer = marker + self._buffer
        self._named = True
        self._span = JsonSpan()
        self._state = self._before_arguments

    def _before_arguments(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._arguments if self._buffer.startswith("{") else self._raw_arguments
            return True
        if self._ended and self._complete:
            self._end()
        return False

    def _tail(self) -> bool:
        if not self._named:
            return super()._tail()
        self._end()
        self._state = self._content
        return True

    def _new_id(self) -> str:
        return super()._new_id()[-_ID_LENGTH:]


class MistralLists(Mistral):
    """The same, where calls are enforced in the older form."""

    CALL_TEXT = CallText(
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        end="}",
        separator=", ",
        trigger=_CALL,
        section=(f"{_CALL} [", "]"),
    )
