"""Tools for models whose chat templates read none: as text of messages, in the generic format.

system     …the functions as JSON, and how to call one
assistant  <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>
user       <tool_response>\n…\n</tool_response>
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from frontend.api.chat.messages import Turn, message_text, parsed_function
from frontend.api.chat.schema import Message
from frontend.text.chat_template import ChatTemplate

__all__ = ["with_tools", "without_calls"]

_SYSTEM_ROLES = ("system", "developer")
_USER = "user"
_TOOL = "tool"
_CALL = "<tool_call>\n{}\n</tool_call>"
_RESULT = "<tool_response>\n{}\n</tool_response>"
_GUIDE = """\
You may call functions. These are the functions, one JSON object a line:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between these tags:
<tool_call>
{{"name": "FUNCTION", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>
Write such a block for each call, and end your reply after the last one. The results come in the next message,
between <tool_response> and </tool_response>. If no function helps, reply without these tags."""


def with_tools(turns: Sequence[Turn], tools: Sequence[dict[str, Any]], template: ChatTemplate) -> list[Turn]:
    """The conversation with `tools` in its system message, or in the first message of the user.

    Templates without a system role leave it out, or refuse it.
    """
    if not tools:
        return [*turns]
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    guide = _GUIDE.format(tools=lines)
    where, first = turns[0]
    if first.role in _SYSTEM_ROLES:
        text = f"{message_text(first, where)}\n\n{guide}"
        return [(where, Message(role=first.role, content=text)), *turns[1:]]
    if first.role != _USER or template.reading.shows("system"):
        return [("tools.", Message(role="system", content=guide)), *turns]
    return [(where, Message(role=_USER, content=f"{guide}\n\n{message_text(first, where)}")), *turns[1:]]


def without_calls(turns: Sequence[Turn]) -> list[Turn]:
    """The conversation with calls and their results as texts. Raises RequestError for malformed calls.

    Results, in the order of their calls, and the user's message after them are one message: many templates
    want users and assistants by turns.
    """
    made: list[Turn] = []
    order: dict[str | None, int] = {}
    is_after_results = False
    for are_results, group in itertools.groupby(turns, key=lambda turn: turn[1].role == _TOOL):
        if are_results:
            made.append(_results(group, order))
            is_after_results = True
            continue
        for where, message in group:
            if is_after_results and message.role == _USER:
                made[-1][1].content = f"{made[-1][1].content}\n{message_text(message, where)}"
            else:
                made.append((where, _calls_as_text(message, where)))
            is_after_results = False
            ids = [call.get("id") for call in message.tool_calls or ()]
            order = {call_id: index for index, call_id in enumerate(ids) if isinstance(call_id, str)} or order
    return made


def _results(turns: Iterable[Turn], order: Mapping[str | None, int]) -> Turn:
    """Consecutive results as one message of the user."""
    results = sorted(turns, key=lambda turn: order.get(turn[1].tool_call_id, len(order)))
    text = "\n".join(_RESULT.format(message_text(message, where)) for where, message in results)
    return results[0][0], Message(role=_USER, content=text)


def _calls_as_text(message: Message, where: str) -> Message:
    if not message.tool_calls:
        return message
    text = message_text(message, where)
    lines = [text] if text else []
    for index, call in enumerate(message.tool_calls):
        function = parsed_function(call, f"{where}tool_calls[{index}]")
        lines.append(_CALL.format(json.dumps(function, ensure_ascii=False)))
    return msgspec.structs.replace(message, content="\n".join(lines), tool_calls=None)
