"""Hermes, Qwen2.5, Qwen3: a JSON object in a tag.

    <tool_call>
    {"name": "f", "arguments": {…}}
    </tool_call>

The last closing tag may be missing.
"""

from frontend.text.reply_formats.base import CallText
from frontend.text.reply_formats.json_calls import JsonCalls
from frontend.text.reply_formats.text import Markers

__all__ = ["Hermes"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class Hermes(JsonCalls):
    """Parses one reply."""

    OPENERS = (_OPEN,)
    MARKERS = (_OPEN, _CLOSE)
    CLOSERS = Markers(_OPEN, _CLOSE)
    CALL_TEXT = CallText(f'{_OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{_CLOSE}", "\n", _OPEN)
