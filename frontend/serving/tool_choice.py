"""Which tool calls a reply must have, and the constraint that enforces it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from atom.messages.grammar import GrammarSource
from frontend.constraint import Constraint
from frontend.errors import RequestError
from frontend.reply_formats.base import CallText
from frontend.schemas.tools import Function

__all__ = ["AUTO", "NAMED", "NONE", "REQUIRED", "ToolChoice", "call_constraint", "read_choice"]

AUTO, NONE, REQUIRED, NAMED = "auto", "none", "required", "named"
_ANY_ARGUMENTS = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True)
class ToolChoice:
    """`tool_choice`."""

    mode: str
    name: str = ""
    """Of the only function that may be called, if it is named."""


def read_choice(tool_choice: str | dict[str, Any] | None) -> ToolChoice:
    """`tool_choice` in the form of chat completions. Raises RequestError for another one."""
    match tool_choice:
        case None:
            return ToolChoice(AUTO)
        case "auto" | "none" | "required" as mode:
            return ToolChoice(str(mode))
        case {"type": "function", "function": {"name": str() as name}}:
            return ToolChoice(NAMED, name)
    raise RequestError(
        "'tool_choice' must be 'auto', 'none', 'required' or "
        '{"type": "function", "function": {"name": …}}',
        param="tool_choice",
    )


def call_constraint(
    choice: ToolChoice, functions: Sequence[Function], text: CallText | None, parallel: bool
) -> Constraint | None:
    """What the reply must be; None where it is free, or the format of calls cannot be enforced.

    With `auto`, strict functions alone constrain it: its text is free up to the beginning of a call.
    """
    is_strict = any(function.strict for function in functions)
    if text is None or choice.mode == NONE or (choice.mode == AUTO and not is_strict):
        return None
    named = [function for function in functions if choice.mode != NAMED or function.name == choice.name]
    calls = {
        "tags": [
            _tag(function, text, with_schema=function.strict or choice.mode != AUTO) for function in named
        ],
        "at_least_one": choice.mode != AUTO,
        "stop_after_first": choice.mode == NAMED or not parallel,
    }
    if choice.mode == AUTO:
        content = {"type": "triggered_tags", "triggers": [text.trigger], **calls}
    else:
        content = {"type": "tags_with_separator", "separator": text.separator, **calls}
    tag = msgspec.json.encode({"type": "structural_tag", "format": content}).decode()
    kind = "structural_tag" if is_strict else "tool_calls"
    return Constraint(GrammarSource(kind, tag), "tools" if choice.mode == AUTO else "tool_choice")


def _tag(function: Function, text: CallText, with_schema: bool) -> dict[str, Any]:
    schema = (function.parameters or {"type": "object", "properties": {}}) if with_schema else _ANY_ARGUMENTS
    return {
        "type": "tag",
        "begin": f"{text.before_name}{function.name}{text.before_arguments}",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": text.end,
    }
