"""Items and tools of /v1/responses in the form that all chat endpoints share."""

import binascii
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from frontend.api.chat.messages import ASSISTANT, Turn
from frontend.api.chat.schema import Message
from frontend.api.chat.tools import check_name, check_tools
from frontend.api.responses.schema import (
    CUSTOM_TOOL,
    IMAGE_PART,
    ITEMS,
    PARTS,
    TOOL,
    CustomCallItem,
    FunctionCallItem,
    FunctionOutputItem,
    MessageItem,
    ReasoningItem,
)
from frontend.api.schemas.fields import kind_of, type_of
from frontend.api.schemas.tools import Function
from frontend.errors import RequestError
from frontend.images.image_parts import image_part

__all__ = ["ItemReader", "tool_choice"]

_SYSTEM_ROLES = frozenset({"system", "developer"})
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_TEXT_PARTS = ("input_text", "output_text", "text")
_IMAGE = "input_image"
_CONTENT_PARTS = (*_TEXT_PARTS, _IMAGE)


class ItemReader:
    """Reads one request; `warnings` gets what is left out."""

    def __init__(self, lenient: bool, warnings: list[str], custom: set[str]):
        """`custom` gets the names of custom tools."""
        self._lenient = lenient
        self._warnings = warnings
        self._custom = custom

    def turns(self, instructions: str | None, items: Iterable[tuple[str, msgspec.Raw]]) -> list[Turn]:
        """The messages of (field, item) pairs. Raises RequestError naming the field at fault."""
        turns: list[Turn] = []
        if instructions:
            turns.append(("instructions.", Message(role="system", content=instructions)))
        for where, raw in items:
            self._add(turns, where, self._item(raw, where))
        return _with_one_system(turns)

    def functions(self, tools: Sequence[msgspec.Raw]) -> list[Function]:
        """Tools of other types run on OpenAI's servers, and are left out with a warning."""
        check_tools(tools)
        functions = []
        for index, raw in enumerate(tools):
            where = f"tools[{index}]."
            kind = type_of(raw, where)
            if kind == "custom":
                functions.append(self._custom_tool(raw, where))
                continue
            if kind != "function":
                self._warnings.append(f"'tools[{index}]' was left out: this server has no {kind!r:.60} tools")
                continue
            tool, left_out = TOOL.decode(bytes(raw), self._lenient, where)
            self._warnings += left_out
            check_name(tool.name, f"{where}name")
            functions.append(Function(tool.name, tool.description, tool.parameters, tool.strict))
        return functions

    def _custom_tool(self, raw: msgspec.Raw, where: str) -> Function:
        tool, left_out = CUSTOM_TOOL.decode(bytes(raw), self._lenient, where)
        self._warnings += left_out
        if tool.format and tool.format != {"type": "text"}:
            self._warnings.append(f"'{where}format' is not enforced: the input may differ from it")
        check_name(tool.name, f"{where}name")
        self._custom.add(tool.name)
        return Function(tool.name, tool.description, _INPUT)

    def _item(self, raw: msgspec.Raw, where: str) -> Any:
        kind = type_of(raw, where) or "message"
        if kind not in ITEMS:
            field = where.rstrip(".")
            raise RequestError(
                f"'{field}' has type {kind!r:.60}; this server takes {', '.join(ITEMS)}, item_reference",
                param=field,
                code="unsupported_parameter",
            )
        item, left_out = ITEMS[kind].decode(bytes(raw), self._lenient, where)
        self._warnings += left_out
        return item

    def _add(self, turns: list[Turn], where: str, item: Any) -> None:
        """Append an item. What the model wrote in one reply is one message."""
        match item:
            case MessageItem(role=role) if role != ASSISTANT:
                read = self._text if role in _SYSTEM_ROLES else self._content
                turns.append((where, Message(role=role, content=read(item.content, where + "content"))))
            case MessageItem():
                text = self._text(item.content, where + "content")
                _reply(turns, where, ("content",)).content = text
            case ReasoningItem():
                text = self._reasoning(item, where)
                _reply(turns, where, ("content", "tool_calls", "reasoning")).reasoning = text
            case FunctionCallItem(call_id=call_id):
                function = {"name": item.name, "arguments": item.arguments}
                _add_call(_reply(turns, where, ()), call_id, function)
            case CustomCallItem():
                custom = {"name": item.name, "arguments": {"input": item.input}}
                _add_call(_reply(turns, where, ()), item.call_id, custom)
            case FunctionOutputItem(call_id=call_id):
                content = self._content(item.output, where + "output")
                turns.append((where, Message(role="tool", content=content, tool_call_id=call_id)))

    def _text(
        self, content: str | Sequence[msgspec.Raw], field: str, kinds: tuple[str, ...] = _TEXT_PARTS
    ) -> str:
        if isinstance(content, str):
            return content
        return "\n".join(self._part(raw, f"{field}[{i}].", kinds) for i, raw in enumerate(content))

    def _content(self, content: str | Sequence[msgspec.Raw], field: str) -> str | list[dict[str, Any]]:
        """Text, or parts in the form of chat completions if there are images."""
        if isinstance(content, str) or not any(_is_image(raw, field) for raw in content):
            return self._text(content, field, _CONTENT_PARTS)
        return [self._chat_part(raw, f"{field}[{index}].") for index, raw in enumerate(content)]

    def _chat_part(self, raw: msgspec.Raw, where: str) -> dict[str, Any]:
        if not _is_image(raw, where):
            return {"type": "text", "text": self._part(raw, where, _CONTENT_PARTS)}
        part, left_out = IMAGE_PART.decode(bytes(raw), self._lenient, where)
        self._warnings += left_out
        return image_part(part.image_url, part.detail)

    def _reasoning(self, item: ReasoningItem, where: str) -> str:
        if item.encrypted_content and not item.content:
            return _decoded(item.encrypted_content, where)
        name, parts = ("content", item.content) if item.content else ("summary", item.summary or ())
        kinds = ("reasoning_text", "summary_text", "text")
        return "\n".join(self._part(raw, f"{where}{name}[{i}].", kinds) for i, raw in enumerate(parts))

    def _part(self, raw: msgspec.Raw, where: str, kinds: tuple[str, ...]) -> str:
        """The text of a part of one of `kinds`."""
        kind_of(raw, where, kinds)
        part, left_out = PARTS.decode(bytes(raw), self._lenient, where)
        self._warnings += left_out
        return part.text


def _is_image(raw: msgspec.Raw, where: str) -> bool:
    return type_of(raw, where) == _IMAGE


def tool_choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """In the form of chat completions, which checks it."""
    match given:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list() as tools}:
            chosen = [
                {"type": "function", "function": tool}
                if isinstance(tool, dict) and tool.get("type") in ("function", "custom")
                else tool
                for tool in tools
            ]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}
        case dict():
            kind = given.get("type")
            raise RequestError(
                f"'tool_choice' has type {kind!r:.60}; this server takes 'auto', 'none', 'required', "
                '{"type": "function", "name": …} and {"type": "allowed_tools", "mode": …, "tools": […]}',
                param="tool_choice",
                code="unsupported_parameter",
            )
    return given


def _reply(turns: list[Turn], where: str, taken: tuple[str, ...]) -> Message:
    """The reply that the last items belong to; a new one if it has one of the fields `taken`."""
    last = turns[-1][1] if turns else None
    if last is None or last.role != ASSISTANT or any(getattr(last, name) for name in taken):
        last = Message(role=ASSISTANT)
        turns.append((where, last))
    return last


def _add_call(reply: Message, call_id: str, function: dict[str, Any]) -> None:
    reply.tool_calls = reply.tool_calls or []
    reply.tool_calls.append({"id": call_id, "type": "function", "function": function})


def _with_one_system(turns: list[Turn]) -> list[Turn]:
    """The first system messages as one: many templates take a single one."""
    first = [*itertools.takewhile(lambda turn: turn[1].role in _SYSTEM_ROLES, turns)]
    if len(first) < 2:
        return turns
    text = "\n\n".join(str(message.content) for _, message in first)
    return [(first[0][0], Message(role="system", content=text)), *turns[len(first) :]]


def _decoded(content: str, where: str) -> str:
    try:
        return binascii.a2b_base64(content, strict_mode=True).decode()
    except ValueError:
        raise RequestError(
            f"'{where}encrypted_content' is not of this server: leave the item out",
            param=f"{where}encrypted_content",
        ) from None
