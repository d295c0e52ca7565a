"""Which tool calls a reply must have, and the constraint that enforces it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from atom.shared.messages.grammar import GrammarSource
from frontend.api.generation.tag_parts import Format, any_of, as_content, in_frame, literal, sequence
from frontend.api.schemas.tools import Function
from frontend.errors import RequestError
from frontend.text.constraint import Constraint
from frontend.text.reply_formats.base import CallText, ReplyFrame

__all__ = [
    "AUTO",
    "NAMED",
    "NONE",
    "REQUIRED",
    "ToolChoice",
    "call_constraint",
    "optional_calls",
    "read_choice",
]

AUTO = "auto"
NONE = "none"
REQUIRED = "required"
NAMED = "named"

_ANY_ARGUMENTS: Format = {"type": "object", "additionalProperties": True}
_NO_ARGUMENTS: Format = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class ToolChoice:
    """`tool_choice`."""

    mode: str
    names: tuple[str, ...] = ()
    """The functions that may be called; empty: all."""

    def allowed(self, functions: Sequence[Function]) -> Sequence[Function]:
        """Those of `functions` that may be called."""
        names = set(self.names)
        return [each for each in functions if each.name in names] if names else functions


def read_choice(tool_choice: str | dict[str, Any] | None) -> ToolChoice:
    """`tool_choice` in the form of chat completions. Raises RequestError for another one."""
    match tool_choice:
        case None:
            return ToolChoice(AUTO)
        case "auto" | "none" | "required" as mode:
            return ToolChoice(str(mode))
        case {"type": "function", "function": {"name": str() as name}}:
            return ToolChoice(NAMED, (name,))
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": tools},
        }:
            return ToolChoice(str(mode), _names(tools))
    raise RequestError(
        "'tool_choice' must be 'auto', 'none', 'required', "
        '{"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": […]}}',
        param="tool_choice",
    )


def _names(tools: Any) -> tuple[str, ...]:
    """The names of the functions in a list of tools. Raises RequestError."""
    names = []
    for tool in tools if isinstance(tools, list) else ():
        match tool:
            case {"type": "function", "function": {"name": str() as name}}:
                names.append(name)
            case _:
                raise RequestError(
                    "'tool_choice.allowed_tools.tools' must have entries of the form "
                    '{"type": "function", "function": {"name": …}}',
                    param="tool_choice.allowed_tools.tools",
                )
    if not names:
        raise RequestError(
            "'tool_choice.allowed_tools.tools' must name at least one tool: use 'none' to allow none",
            param="tool_choice.allowed_tools.tools",
        )
    return tuple(dict.fromkeys(names))


def call_constraint(
    choice: ToolChoice,
    functions: Sequence[Function],
    text: CallText | None,
    parallel: bool,
    frame: ReplyFrame | None = None,
) -> Constraint | None:
    """What the reply must be; None where it is free, or the format of calls cannot be enforced.

    With `auto`, strict functions and a choice of some alone constrain it: its text is free up to the
    beginning of a call.
    """
    named = choice.allowed(functions)
    is_free = not choice.names and not any(function.strict for function in named)
    if text is None or choice.mode == NONE or (choice.mode == AUTO and is_free):
        return None
    is_single = choice.mode == NAMED or not parallel or frame is not None
    if choice.mode != AUTO:
        reply = _calls(_any_call(named, text, strict=True), text, is_single)
        field = "tool_choice"
    elif frame is not None:
        reply = any_of(_any_call(named, text), as_content({"type": "any_text"}, frame))
        field = "tools"
    else:
        reply = _any_content(named, text, is_single)
        field = "tools"
    tag = msgspec.json.encode({"type": "structural_tag", "format": in_frame(reply, frame)}).decode()
    return Constraint(GrammarSource("tool_calls", tag), field)


def optional_calls(
    choice: ToolChoice,
    functions: Sequence[Function],
    text: CallText | None,
    parallel: bool,
    frame: ReplyFrame | None = None,
) -> Format | None:
    """At least one call, for a reply that is either calls or structured output; None with another choice."""
    if text is None or choice.mode != AUTO:
        return None
    call = _any_call(choice.allowed(functions), text)
    return _calls(call, text, is_single=not parallel or frame is not None)


def _any_content(functions: Sequence[Function], text: CallText, is_single: bool) -> Format:
    """Text, and after each trigger the rest of a call or of a section; without triggers one or the other."""
    if not text.trigger:
        content = {"type": "any_text", "excludes": text.no_content}
        other = sequence({"type": "regex", "pattern": text.other_begin}, content)
        calls = _calls(_any_call(functions, text), text, is_single)
        return {"type": "optional", "content": any_of(calls, other)}
    if text.section[0]:
        begin = text.section[0].removeprefix(text.trigger)
        rest = _calls(_any_call(functions, text), replace(text, section=(begin, text.section[1])), is_single)
    else:
        rest = _any_call(functions, replace(text, before_name=text.before_name.removeprefix(text.trigger)))
    if not text.tokens:
        rules = [(text.trigger, rest)]
        excludes = text.no_content
        return {"type": "dispatch", "rules": rules, "loop": not is_single, "excludes": excludes}
    token_rules = [(text.tokens[text.trigger], rest)]
    others = [token_id for marker, token_id in text.tokens.items() if marker != text.trigger]
    return {"type": "token_dispatch", "rules": token_rules, "loop": not is_single, "exclude_tokens": others}


def _calls(call: Format, text: CallText, is_single: bool) -> Format:
    """At least one call, in a section if the format has one."""
    further = sequence(*literal(text.separator, text.tokens), call)
    more = [] if is_single else [{"type": "star", "content": further}]
    begin, end = (literal(marker, text.tokens) for marker in text.section)
    return sequence(*begin, call, *more, *end)


def _any_call(functions: Sequence[Function], text: CallText, strict: bool = False) -> Format:
    """A call of one of `functions`, with arguments of its schema if it is strict, or all are."""
    return any_of(*(_call(function, text, strict or bool(function.strict)) for function in functions))


def _call(function: Function, text: CallText, with_schema: bool) -> Format:
    arguments = {
        "type": "json_schema",
        "json_schema": (function.parameters or _NO_ARGUMENTS) if with_schema else _ANY_ARGUMENTS,
        "style": text.style,
        "tool": function.name,
        "lenient": not function.strict,
    }
    return sequence(
        *literal(text.before_name + function.name, text.tokens),
        *([{"type": "regex", "pattern": text.number}] if text.number else ()),
        *literal(text.before_arguments, text.tokens),
        arguments,
        *literal(text.end, text.tokens),
    )
