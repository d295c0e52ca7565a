"""POST /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from frontend.api.schemas.fields import Schema
from frontend.api.schemas.generation import (
    HARMLESS,
    HARMLESS_TYPES,
    NESTED,
    NEUTRAL,
    GenerationRequest,
    PromptLogprob,
    Usage,
)
from frontend.api.schemas.kv_transfer import KVTransferParams
from frontend.errors import RequestError
from frontend.images.image_parts import IMAGE_URL

__all__ = [
    "CHAT",
    "MESSAGE",
    "ChatChoice",
    "ChatLogprobs",
    "ChatRequest",
    "ChatResponse",
    "ChatTokenLogprob",
    "ChatTopLogprob",
    "FunctionCall",
    "Message",
    "Reply",
    "ToolCall",
    "check_parts",
]

_HARMLESS = frozenset({"type", "annotations", "cache_control"})
_PART_FIELDS = {name: _HARMLESS | {name} for name in ("text", "refusal", IMAGE_URL)}
"""Fields of content parts, by their types."""
# So many names of unknown fields in the parts of a message.
_MAX_REPORTED = 8


class ChatRequest(GenerationRequest, kw_only=True):
    """A conversation; `prompt` is another name of `messages`."""

    messages: list[msgspec.Raw] | None = None
    """The `name` of a message changes nothing unless the chat template reads it."""
    prompt: list[msgspec.Raw] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """Number of top tokens per generated token; requires `logprobs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template."""
    reasoning_effort: str | None = None
    """A further template variable; `none` and the others also set the template's switch of reasoning."""
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the response."""
    tools: list[msgspec.Raw] | None = None
    """The functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """`auto`, or `none`: the reply is not searched for tool calls."""
    parallel_tool_calls: bool | None = None
    """False returns only the first tool call of a reply."""
    add_generation_prompt: bool | None = None
    """Begin a new assistant message; defaults to true unless the last message is continued."""
    continue_final_message: bool | None = None
    """Continue the last message."""


class Message(msgspec.Struct, kw_only=True):
    """One message of the conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    """Text of an assistant in place of content."""


def check_parts(parts: Sequence[Mapping[str, Any]], where: str, lenient: bool) -> list[str]:
    """Warnings about fields of `parts` that have no effect. Raises RequestError unless `lenient`."""
    unknown: dict[str, str] = {}
    for index, part in enumerate(parts):
        kind = part.get("type")
        known = _PART_FIELDS.get(kind) if isinstance(kind, str) else None
        for name in part.keys() - known if known is not None else ():
            if part[name] is not None and name not in unknown and len(unknown) < _MAX_REPORTED:
                unknown[name] = f"{where}[{index}].{name}"
    problems = [(field, f"'{field}' is not a field of this server") for field in sorted(unknown.values())]
    if problems and not lenient:
        field, problem = problems[0]
        raise RequestError(f"{problem}: leave it out", param=field, code="unsupported_parameter")
    return [f"{problem} and was left out, also in further parts" for _, problem in problems]


class FunctionCall(msgspec.Struct, frozen=True):
    """A call of an offered function."""

    name: str
    arguments: str
    """JSON text; if the model wrote no valid JSON, what it wrote."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """Null if there is nothing but tool calls."""
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """The reasoning, for models whose format separates it from the content."""
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """Older name of `reasoning`, for existing clients."""
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatTopLogprob(msgspec.Struct, frozen=True):
    """One of the top tokens."""

    token: str
    logprob: float
    bytes: list[int] | None
    """UTF-8 bytes: a token may hold part of a character."""


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """One token, and the top tokens at its position, most likely first."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of all generated tokens, including stop tokens."""

    content: list[ChatTokenLogprob]


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the `n` replies."""

    index: int
    message: Reply
    finish_reason: str
    raw_finish_reason: str
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """With `return_token_ids`: the generated ids, including the stop token."""


class ChatResponse(msgspec.Struct, kw_only=True):
    """The body of a non-streaming response."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[PromptLogprob | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: KVTransferParams | msgspec.UnsetType | None = msgspec.UNSET
    """With do_remote_decode: what a router sends on to the server that generates; null if nothing is kept."""
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


CHAT = Schema(
    ChatRequest,
    neutral=NEUTRAL
    | {
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "moderation": (),
        "modalities": (["text"],),
        "reasoning": (),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
        "thinking": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
    harmless=HARMLESS,
    harmless_types=HARMLESS_TYPES,
    nested=NESTED | {"chat_template_kwargs": None, "tool_choice": None},
    instead={"functions": "use 'tools'", "function_call": "use 'tool_choice'"},
)

MESSAGE = Schema(
    Message,
    neutral={"audio": (), "function_call": (), "partial": (False,), "prefix": (False,), "weight": (1,)},
    # Parts of earlier replies that clients send back; templates do not read them.
    harmless=frozenset({"annotations", "id"}),
)
