"""Messages of a conversation, checked and in the form that chat templates expect."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from frontend.api.chat.schema import MESSAGE, Message, check_parts
from frontend.api.schemas.structure import check_structure
from frontend.errors import RequestError
from frontend.images.image_parts import IMAGE_URL, ImageParts, ImageRules
from frontend.text.chat_template import ChatTemplate
from frontend.text.template_reading import ContentForm, text_of
from frontend.text.template_source import TemplateSource

__all__ = [
    "ASSISTANT",
    "Turn",
    "decode_messages",
    "message_text",
    "parsed_function",
    "template_call",
    "template_messages",
]

ASSISTANT = "assistant"
_SYSTEM = "system"
_DEVELOPER = "developer"
_COMMON_ROLES = frozenset({_SYSTEM, "user", ASSISTANT})
_TOOL_ROLES = frozenset({"tool", "function"})
# A template may expect messages of further roles at some place that no probe has.
_PROBED_ROLES = _COMMON_ROLES | _TOOL_ROLES
_TEXT = "text"
_NO_IMAGES = ImageParts(ImageRules("the text of this message must stand alone"))
_REFUSAL = "refusal"
# Refused where the template does not read them. Names and reasoning are not among them: clients send names
# with every message, and reasoning back with every reply; templates leave out earlier reasoning by design.
_OPTIONAL_FIELDS = ("tool_calls", "tool_call_id")

Turn = tuple[str, Message]
"""The field of a message in the request's body, a prefix of names in errors, and the message."""


def decode_messages(raw_messages: Sequence[msgspec.Raw], lenient: bool, warnings: list[str]) -> list[Turn]:
    """Messages in OpenAI's form. Raises RequestError naming the field at fault."""
    turns = []
    for index, raw in enumerate(raw_messages):
        where = f"messages[{index}]."
        message, left_out = MESSAGE.decode(bytes(raw), lenient, where)
        warnings += left_out
        if isinstance(message.content, list):
            warnings += check_parts(message.content, f"{where}content", lenient)
        turns.append((where, message))
    return turns


def template_messages(
    turns: Sequence[Turn], template: ChatTemplate, lenient: bool, warnings: list[str], images: ImageParts
) -> list[dict[str, Any]]:
    """The messages for a template; `images` collects theirs.

    Raises RequestError naming the field at fault.
    """
    source = template.source
    messages = []
    calls: list[Any] = []
    for where, message in turns:
        message.role = _role(message.role, source, where)
        message.tool_calls = message.tool_calls or None
        if message.tool_calls:
            calls = [call.get("id") for call in message.tool_calls]
        elif message.tool_call_id is not None and calls and calls[0] == message.tool_call_id:
            del calls[0]  # results in the order of their calls need no id
            if not source.reads("tool_call_id"):
                message.tool_call_id = None
        _drop_unread(message, source, lenient, where, warnings)
        fields = _for_template(message, source, where, images)
        _check_shown(fields, template, lenient, where, warnings)
        messages.append(fields)
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
    if not source.reads("name"):
        message.name = None
    for name in _OPTIONAL_FIELDS:
        if not getattr(message, name) or source.reads(name):
            continue
        _leave_out(f"{where}{name}", "is not read by this model's chat template", lenient, warnings)
        setattr(message, name, None)


def _check_shown(
    fields: dict[str, Any], template: ChatTemplate, lenient: bool, where: str, warnings: list[str]
) -> None:
    """Raises RequestError for the text of a role whose texts the template leaves out."""
    role = fields["role"]
    if role not in _PROBED_ROLES or not fields["content"]:
        return
    if template.reading.form(role) is ContentForm.NONE:
        problem = f"is not shown to the model: its chat template leaves out messages of the role {role!r}"
        _leave_out(f"{where}content", problem, lenient, warnings)


def _leave_out(field: str, problem: str, lenient: bool, warnings: list[str]) -> None:
    if not lenient:
        raise RequestError(f"'{field}' {problem}: leave it out", param=field, code="unsupported_parameter")
    warnings.append(f"'{field}' {problem} and was left out")


def _for_template(message: Message, source: TemplateSource, where: str, images: ImageParts) -> dict[str, Any]:
    """The message as templates expect it: content as text or several parts, null fields left out."""
    fields = {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
    fields.pop("refusal", None)
    fields["content"] = _content(message, where, images)
    if message.tool_calls is not None:
        fields["tool_calls"] = [
            template_call(call, source, f"{where}tool_calls[{index}]")
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


def message_text(message: Message, where: str) -> str:
    """The text of a message. Raises RequestError for one without, and for parts of other types."""
    return text_of(_content(message, where, _NO_IMAGES))


def _content(message: Message, where: str, images: ImageParts) -> str | list[dict[str, Any]]:
    content = message.content
    if isinstance(content, list):
        is_reply = message.role == ASSISTANT
        parts = []
        for index, part in enumerate(content):
            field = f"{where}content[{index}]"
            is_image = part.get("type") == IMAGE_URL
            parts.append(
                images.add(part, message.role, field) if is_image else _text_part(part, field, is_reply)
            )
        is_text = all(part["type"] == _TEXT for part in parts)
        return text_of(parts) if is_text and len(parts) < 2 else parts
    if not content and message.refusal:
        return message.refusal
    if content is None and not message.tool_calls and message.role != ASSISTANT:
        raise RequestError(f"'{where}content' is missing", param=f"{where}content")
    return content or ""


def _text_part(part: dict[str, Any], where: str, is_reply: bool) -> dict[str, Any]:
    """A part of type text; a refusal of the assistant is text."""
    kind = part.get("type")
    if kind != _TEXT and not (kind == _REFUSAL and is_reply):
        raise RequestError(
            f"'{where}' has type {kind!r:.40}; this model takes parts of type 'text', and some models "
            f"'{IMAGE_URL}'",
            param=where,
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise RequestError(f"'{where}.{kind}' must be a string", param=f"{where}.{kind}")
    return {"type": _TEXT, "text": text}


def template_call(call: dict[str, Any], source: TemplateSource, where: str) -> dict[str, Any]:
    """`call` with its arguments in the form that the template takes; OpenAI's form is JSON text."""
    parsed = parsed_function(call, where)
    arguments = parsed["arguments"]
    function = call["function"]
    given = function.get("arguments")
    if source.joins_arguments:
        is_text = isinstance(given, str) and given.strip()
        arguments = given if is_text else json.dumps(arguments, ensure_ascii=False)
    elif source.needs_argument_fields and not isinstance(arguments, dict):
        arguments = {"arguments": arguments}
    return {**call, "function": {**function, "arguments": arguments}}


def parsed_function(call: dict[str, Any], where: str) -> dict[str, Any]:
    """The name and the parsed arguments of a call. Raises RequestError for another object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"'{where}.function' must be an object with a name and arguments", param=f"{where}.function"
        )
    given = function.get("arguments")
    if isinstance(given, str):
        given = _parsed(given, f"{where}.function.arguments")
    return {"name": function["name"], "arguments": {} if given is None else given}


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
