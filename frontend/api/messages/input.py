"""Conversations of /v1/messages in the form that all chat endpoints share."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from frontend.api.chat.conversation import Conversation
from frontend.api.chat.messages import ASSISTANT, Turn
from frontend.api.chat.schema import Message
from frontend.api.chat.tools import check_name, check_tools
from frontend.api.messages.schema import (
    BLOCKS,
    TOOL,
    TURN,
    CountRequest,
    ImageBlock,
    ImageSource,
    RedactedThinkingBlock,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from frontend.api.schemas.fields import kind_of, type_of
from frontend.api.schemas.tools import Function
from frontend.errors import RequestError
from frontend.images.image_parts import image_part

__all__ = ["MessagesReader"]

# Claude Code begins its system prompt so, for accounting. It differs from request to request, so that no
# prompt would begin like one in the prefix cache.
_BILLING = "x-anthropic-billing-header"
_CLEARED_THINKING = "clear_thinking_"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_FIELDS = {"chat_template_kwargs.enable_thinking": "thinking", "reasoning_effort": "output_config.effort"}


class MessagesReader:
    """Reads one request; `warnings` gets what is left out."""

    def __init__(self, lenient: bool, warnings: list[str]):
        self._lenient = lenient
        self._warnings = warnings

    def conversation(self, request: CountRequest) -> Conversation:
        """Raises RequestError naming the field at fault."""
        _check_context_management(request.context_management)
        turns = [*self._system(request.system)]
        for index, raw in enumerate(request.messages):
            turns += self._turns(raw, f"messages[{index}].")
        continues = turns[-1][1].role == ASSISTANT
        choice = request.tool_choice or {}
        return Conversation(
            turns=turns,
            functions=self._functions(request.tools or ()),
            tool_choice=_tool_choice(choice),
            parallel=choice.get("disable_parallel_tool_use") is not True,
            template_kwargs=self._switch(request.thinking),
            effort=None if request.output_config is None else request.output_config.effort,
            option_fields=_FIELDS,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )

    def _switch(self, thinking: Thinking | None) -> dict[str, bool]:
        """The template's switch of reasoning."""
        if thinking is None or thinking.type == "adaptive":  # the model decides, as without the field
            return {}
        if thinking.budget_tokens is not None:
            self._warnings.append("'thinking.budget_tokens' is a target that is not enforced")
        return {"enable_thinking": thinking.type == "enabled"}

    def _system(self, system: str | Sequence[msgspec.Raw] | None) -> Iterator[Turn]:
        if system is None:
            return
        if isinstance(system, str):
            texts = [system]
        else:
            blocks = [self._block(raw, f"system[{index}].", "text") for index, raw in enumerate(system)]
            texts = [block.text for block in blocks]
        text = "\n".join(text for text in texts if not text.startswith(_BILLING))
        if text:
            yield "system.", Message(role="system", content=text)

    def _turns(self, raw: msgspec.Raw, where: str) -> Iterator[Turn]:
        turn, left_out = TURN.decode(bytes(raw), self._lenient, where)
        self._warnings += left_out
        if isinstance(turn.content, str):
            yield where, Message(role=turn.role, content=turn.content)
            return
        kinds = _USER if turn.role == "user" else _ASSISTANT if turn.role == ASSISTANT else ("text",)
        blocks = [
            (field, self._block(each, field, *kinds))
            for index, each in enumerate(turn.content)
            for field in [f"{where}content[{index}]."]
        ]
        if turn.role == ASSISTANT:
            yield where, _assistant(block for _, block in blocks)
            return
        others = []
        for field, block in blocks:  # results first: they belong to the calls before
            if isinstance(block, ToolResultBlock):
                yield field, self._result(block, field)
            else:
                others.append((field, block))
        if others or not blocks:
            yield where, Message(role=turn.role, content=_content(others))

    def _result(self, block: ToolResultBlock, where: str) -> Message:
        given = block.content or ""
        if isinstance(given, str):
            content: str | list[dict[str, Any]] = given
        else:
            fields = [f"{where}content[{index}]." for index in range(len(given))]
            blocks = [self._block(raw, at, *_RESULT) for at, raw in zip(fields, given, strict=True)]
            content = _content([*zip(fields, blocks, strict=True)])
        if block.is_error:
            content = _as_error(content)
        return Message(role="tool", content=content, tool_call_id=block.tool_use_id)

    def _block(self, raw: msgspec.Raw, where: str, *kinds: str) -> Any:
        """A content block of one of `kinds`."""
        block, left_out = BLOCKS[kind_of(raw, where, kinds)].decode(bytes(raw), self._lenient, where)
        self._warnings += left_out
        if isinstance(block, RedactedThinkingBlock):
            field = where.rstrip(".")
            self._warnings.append(f"'{field}' was left out: only the model that wrote it can read it")
        return block

    def _functions(self, tools: Sequence[msgspec.Raw]) -> list[Function]:
        check_tools(tools)
        functions = []
        for index, raw in enumerate(tools):
            where = f"tools[{index}]."
            kind = type_of(raw, where)
            if kind not in (None, "custom"):
                raise RequestError(
                    f"'{where}type' is {kind!r:.60}: this server has no tools of its own, "
                    "only functions with an 'input_schema' can be offered",
                    param=f"{where}type",
                    code="unsupported_parameter",
                )
            tool, left_out = TOOL.decode(bytes(raw), self._lenient, where)
            self._warnings += left_out
            check_name(tool.name, f"{where}name")
            functions.append(
                Function(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.input_schema,
                    strict=tool.strict,
                )
            )
        return functions


_RESULT = ("text", "image")
_USER = (*_RESULT, "tool_result")
_ASSISTANT = ("text", "tool_use", "thinking", "redacted_thinking")


def _content(blocks: Sequence[tuple[str, TextBlock | ImageBlock]]) -> str | list[dict[str, Any]]:
    """Text, or parts in the form of chat completions if there are images."""
    if all(isinstance(block, TextBlock) for _, block in blocks):
        return "\n".join(block.text for _, block in blocks if isinstance(block, TextBlock))
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, TextBlock)
        else image_part(_url(block.source, f"{field}source"))
        for field, block in blocks
    ]


def _url(source: ImageSource, field: str) -> str:
    """The data: URL of a file; a URL as it is."""
    given = (source.media_type, source.data) if source.type == "base64" else (source.url,)
    if None in given:
        needed = "'media_type' and 'data'" if source.type == "base64" else "'url'"
        raise RequestError(f"'{field}' of type {source.type!r} needs {needed}", param=field)
    return source.url or f"data:{source.media_type};base64,{source.data}"


def _as_error(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    return f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error:"}, *content]


def _assistant(blocks: Iterator[Any]) -> Message:
    texts = []
    calls = []
    thoughts = []
    for block in blocks:
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=thinking):
                thoughts.append(thinking)
            case ToolUseBlock(id=call_id, name=name, input=arguments):
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
    return Message(
        role=ASSISTANT,
        content="\n".join(texts),
        tool_calls=calls or None,
        reasoning="\n".join(thoughts) or None,
    )


def _check_context_management(given: dict[str, Any] | None) -> None:
    edits = (given or {}).get("edits") or []
    for edit in edits if isinstance(edits, list) else [edits]:
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if not (isinstance(kind, str) and kind.startswith(_CLEARED_THINKING)):
            raise RequestError(
                f"'context_management.edits' has {kind!r:.60}, which is not supported: only edits that "
                f"begin with '{_CLEARED_THINKING}' are",
                param="context_management.edits",
                code="unsupported_parameter",
            )


def _tool_choice(choice: dict[str, Any]) -> str | dict[str, Any] | None:
    """In the form of chat completions."""
    match choice:
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": str(kind)} if kind in _CHOICES:
            return _CHOICES[kind]
        case _ if not choice:
            return None
    raise RequestError(
        "'tool_choice' must have type 'auto', 'any', 'none', or 'tool' with a name", param="tool_choice"
    )
