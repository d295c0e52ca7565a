"""Messages of a conversation, checked and in the form that chat templates expect."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from frontend.api.chat.schema import MESSAGE, Message, check_part
from frontend.api.schemas.structure import check_structure
from frontend.errors import RequestError
from frontend.text.template_source import TemplateSource

__all__ = ["ASSISTANT", "Turn", "decode_messages", "template_messages"]

ASSISTANT = "assistant"
_SYSTEM = "system"
_DEVELOPER = "developer"
_COMMON_ROLES = frozenset({_SYSTEM, "user", ASSISTANT})
_TOOL_ROLES = frozenset({"tool", "function"})
# Refused where the template does not read them. Reasoning is not among them:
# clients send it back with every reply, and templates leave out that of earlier turns by design.
_OPTIONAL_FIELDS = ("name", "tool_calls", "tool_call_id")


Turn = tuple[str, Message]
"""The field of a message in the request's body, a prefix of names in errors, and the message."""


def decode_messages(raw_messages: Sequence[msgspec.Raw], lenient: bool, warnings: list[str]) -> list[Turn]:
    """Messages in OpenAI's form. Raises RequestError naming the field at fault."""
    turns = []
    for index, raw in enumerate(raw_messages):
        where = f"messages[{index}]."
        message, left_out = MESSAGE.decode(bytes(raw), lenient, where)
        warnings += left_out
        turns.append((where, message))
    return turns


def template_messages(
    turns: Sequence[Turn], source: TemplateSource, lenient: bool, warnings: list[str]
) -> list[dict[str, Any]]:
    """The messages for a template. Raises RequestError naming the field at fault."""
    messages = []
    calls: list[Any] = []
    for where, message in turns:
        message.role = _role(message.role, source, where)
        if message.tool_calls:
            calls = [call.get("id") for call in message.tool_calls]
        elif message.tool_call_id is not None and calls and calls[0] == message.tool_call_id:
            del calls[0]  # results in the order of their calls need no id
            if not source.reads("tool_call_id"):
                message.tool_call_id = None
        _drop_unread(message, source, lenient, where, warnings)
        messages.append(_for_template(message, source, where))
    return messages


def _role(role: str, source: TemplateSource, where: str) -> str:
    if role in _COMMON_ROLES or source.names_role(role):
        return role
    if role in _TOOL_ROLES and source.writes_roles:
        return role
    if role == _DEVELOPER:  # OpenAI's newer name of the system role
        return _SYSTEM
    raise RequestError(
        f"'{where}role' is {role[:40]!r}, which this model's chat template does not support",
        param=f"{where}role",
    )


def _drop_unread(
    message: Message, source: TemplateSource, lenient: bool, where: str, warnings: list[str]
) -> None:
    for name in _OPTIONAL_FIELDS:
        if not getattr(message, name) or source.reads(name):
            continue
        problem = f"'{where}{name}' is not read by this model's chat template"
        if not lenient:
            raise RequestError(
                f"{problem}: leave it out", param=f"{where}{name}", code="unsupported_parameter"
            )
        warnings.append(f"{problem} and was left out")
        setattr(message, name, None)


def _for_template(message: Message, source: TemplateSource, where: str) -> dict[str, Any]:
    """The message as templates expect it: content as text, null fields left out."""
    fields = {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
    fields["content"] = _plain_text(message, where)
    if message.tool_calls is not None:
        fields["tool_calls"] = [
            _template_call(call, source, f"{where}tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
        if not fields["content"] and source.tests_content_for_none:
            fields["content"] = None
    _name_reasoning(fields, source)
    return fields


def _name_reasoning(fields: dict[str, Any], source: TemplateSource) -> None:
    """Give reasoning the name that the template reads; clients send back either of the first two."""
    reasoning = fields.get("reasoning_content") or fields.get("reasoning")
    if not reasoning:
        return
    fields["reasoning_content"] = reasoning
    # GPT-OSS reads it by this name before tool calls, and then refuses content in the same message.
    if source.reads("thinking") and fields.get("tool_calls") and not fields["content"]:
        fields["thinking"] = reasoning


def _plain_text(message: Message, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.tool_calls or message.role == ASSISTANT:
            return ""
        raise RequestError(f"'{where}content' is missing", param=f"{where}content")
    return "\n".join(_part_text(part, f"{where}content[{index}]") for index, part in enumerate(content))


def _part_text(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    text = part.get("text")
    if kind != "text":
        raise RequestError(
            f"'{where}' has type {kind!r:.40}; this model takes parts of type 'text' only", param=where
        )
    if not isinstance(text, str):
        raise RequestError(f"'{where}.text' must be a string", param=f"{where}.text")
    check_part(part, where)
    return text


def _template_call(call: dict[str, Any], source: TemplateSource, where: str) -> dict[str, Any]:
    """`call` with its arguments in the form that the template takes; OpenAI's form is JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"'{where}.function' must be an object with a name and arguments", param=f"{where}.function"
        )
    given = function.get("arguments")
    field = f"{where}.function.arguments"
    arguments = _parsed(given, field) if isinstance(given, str) else {} if given is None else given
    if source.joins_arguments:
        is_text = isinstance(given, str) and given.strip()
        arguments = given if is_text else json.dumps(arguments, ensure_ascii=False)
    elif source.needs_argument_fields and not isinstance(arguments, dict):
        arguments = {"arguments": arguments}
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(text: str, field: str) -> Any:
    """The arguments in `text`. Models may generate invalid JSON; it stays text."""
    if not text.strip():
        return {}
    check_structure(text.encode(), field)
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise RequestError(f"'{field}' is nested too deeply", param=field) from None
