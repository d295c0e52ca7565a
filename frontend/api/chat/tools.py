"""The tools of a conversation, checked and in the form that chat templates expect."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from frontend.api.chat.conversation import Conversation
from frontend.api.chat.formats import ChatFormat
from frontend.api.chat.tool_choice import (
    NAMED,
    NONE,
    REQUIRED,
    ToolChoice,
    call_constraint,
    optional_calls,
    read_choice,
)
from frontend.api.generation.tag_parts import Format
from frontend.api.schemas.tools import TOOL, Function
from frontend.errors import RequestError
from frontend.text.constraint import Constraint

__all__ = ["NO_TOOLS", "Tools", "check_name", "check_tools", "decode_functions", "read_tools"]

MAX_TOOLS = 1024
# A template writes the tools as JSON, which holds the GIL for about 10 ms per MiB.
MAX_TOOLS_BYTES = 2 * 1024 * 1024
_NAME = re.compile(r"[^\s<>\"'\\{}\x00-\x1f\x7f-\x9f]{1,256}")
_FUNCTION = "function"


@dataclass(frozen=True)
class Tools:
    """What a request says about tools."""

    shown: list[dict[str, Any]] | None = None
    """For the chat template; None: no tools."""
    described: Sequence[dict[str, Any]] = ()
    """For a system message, where the template reads no tools."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The parameter schema of each function."""
    are_called: bool = False
    """Whether the reply is searched for tool calls."""
    constraint: Constraint | None = None
    """The calls that the reply must have; None: it is free."""
    optional_calls: Format | None = None
    """The calls that it may have in place of structured output."""


NO_TOOLS = Tools()


def read_tools(
    conversation: Conversation,
    chosen: ChatFormat,
    lenient: bool,
    warnings: list[str],
) -> Tools:
    """The tools of `conversation`. Raises RequestError naming the field at fault."""
    choice = read_choice(conversation.tool_choice)
    functions = conversation.functions
    if not functions:
        _check_offered(choice, functions)
        return NO_TOOLS
    if problem := chosen.tool_problem:
        return _left_out("tools", problem, lenient, warnings)
    _check_offered(choice, functions)
    reply_format = chosen.reply
    assert reply_format is not None, "calls of its format are parsed"
    offered = functions, reply_format.call_text, conversation.parallel, reply_format.frame
    constraint = call_constraint(choice, *offered)
    if constraint is None and (choice.mode in (REQUIRED, NAMED) or choice.names):
        problem = f"{choice.mode} calls cannot be enforced in the format of this model: use 'auto'"
        _left_out("tool_choice", problem, lenient, warnings)
    if constraint is None and choice.mode != NONE and any(function.strict for function in functions):
        warnings.append("'strict' of tools is not enforced: arguments may differ from their schema")
    tools = [{"type": _FUNCTION, "function": _shown(function)} for function in functions]
    return Tools(
        None if reply_format.describes_tools else tools,
        # Models that know no tools would call them all the same.
        tools if reply_format.describes_tools and choice.mode != NONE else [],
        {function.name: function.parameters or {} for function in functions},
        are_called=choice.mode != NONE,
        constraint=constraint,
        optional_calls=optional_calls(choice, *offered),
    )


def decode_functions(
    tools: Sequence[msgspec.Raw] | None, lenient: bool, warnings: list[str]
) -> list[Function]:
    """The functions of `tools` in the form of chat completions. Raises RequestError."""
    check_tools(tools or ())
    return [
        _function(bytes(raw), f"tools[{index}].", lenient, warnings) for index, raw in enumerate(tools or ())
    ]


def _check_offered(choice: ToolChoice, functions: Sequence[Function]) -> None:
    """Raises RequestError for a choice that needs a function that is not offered."""
    names = {function.name for function in functions}
    if choice.mode == REQUIRED and not names:
        raise RequestError("'tool_choice' is 'required', and there are no 'tools'", param="tool_choice")
    for name in choice.names:
        if name not in names:
            raise RequestError(
                f"'tool_choice' names {name[:80]!r}, which is not among the tools", param="tool_choice"
            )


def _left_out(name: str, problem: str, lenient: bool, warnings: list[str]) -> Tools:
    if not lenient:
        raise RequestError(f"'{name}': {problem}", param=name, code="unsupported_parameter")
    warnings.append(f"'{name}' was left out: {problem}")
    return NO_TOOLS


def check_tools(tools: Sequence[msgspec.Raw]) -> None:
    """Raises RequestError for too many tools, or too large ones."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(
            f"'tools' has {len(tools)} entries, at most {MAX_TOOLS} are allowed", param="tools"
        )
    if (size := sum(len(memoryview(raw)) for raw in tools)) > MAX_TOOLS_BYTES:
        raise RequestError(f"'tools' has {size} bytes, at most {MAX_TOOLS_BYTES} are allowed", param="tools")


def _function(raw: bytes, where: str, lenient: bool, warnings: list[str]) -> Function:
    tool, left_out = TOOL.decode(raw, lenient, where)
    warnings += left_out
    if tool.type != _FUNCTION:
        raise RequestError(
            f"'{where}type' is {tool.type[:40]!r}: only tools of type '{_FUNCTION}' are supported",
            param=f"{where}type",
        )
    check_name(tool.function.name, f"{where}function.name")
    return tool.function


def check_name(name: str, field: str) -> None:
    """Raises RequestError for the name of a function that some format of calls could not hold."""
    if not (_NAME.fullmatch(name) and name.isprintable()):
        raise RequestError(
            f"'{field}' is {name[:40]!r}: it must have 1 to 256 characters, and no white space, "
            "control characters, quotes, braces, backslashes, < or >",
            param=field,
        )


def _shown(function: Function) -> dict[str, Any]:
    """In the order in which models were trained to read them."""
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in fields.items() if value is not None}
