"""POST /v1/chat/completions."""

from typing import Any, Literal

import msgspec

from frontend.schemas.fields import Schema
from frontend.schemas.generation import HARMLESS, NEUTRAL, GenerationRequest, PromptLogprob, Usage

__all__ = [
    "CHAT",
    "MESSAGE",
    "ChatChoice",
    "ChatLogprobs",
    "ChatRequest",
    "ChatResponse",
    "ChatTokenLogprob",
    "ChatTopLogprob",
    "Message",
    "Reply",
]


class ChatRequest(GenerationRequest, kw_only=True):
    """A conversation; `prompt` is another name of `messages`."""

    messages: list[msgspec.Raw] | None = None
    prompt: list[msgspec.Raw] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """How many of the most likely tokens beside each one; needs `logprobs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables that the model's template reads by itself."""
    reasoning_effort: str | None = None
    """Another such variable."""
    add_generation_prompt: bool | None = None
    """Ask for a new message; true unless the final one is to be continued."""
    continue_final_message: bool | None = None
    """The reply goes on where the last message ends."""


class Message(msgspec.Struct, kw_only=True):
    """One turn of the conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """What led to the content, where the model's format tells them apart."""
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """The same under its older name, which clients still read."""


class ChatTopLogprob(msgspec.Struct, frozen=True):
    """One of the likely tokens."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Where a character is spread over tokens, only these can be joined."""


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """One token, and the most likely ones in its place, the most likely first."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of every generated token, those that ended the reply included."""

    content: list[ChatTokenLogprob]


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the `n` replies."""

    index: int
    message: Reply
    finish_reason: str
    raw_finish_reason: str
    stop_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Where asked for: the generated ids, with the one that ended the reply."""


class ChatResponse(msgspec.Struct, kw_only=True):
    """The body of a reply that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[PromptLogprob | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
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
        "include_reasoning": (True,),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "moderation": (),
        "modalities": (["text"],),
        "reasoning": (),
        "separate_reasoning": (False,),
        "stream_reasoning": (True,),
        "thinking": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
    # Without tools there is nothing that could run in parallel.
    harmless=HARMLESS | {"parallel_tool_calls"},
)

MESSAGE = Schema(
    Message,
    neutral={"audio": (), "function_call": (), "partial": (False,), "prefix": (False,), "weight": (1,)},
    # What clients send back from earlier replies, and no template reads.
    harmless=frozenset({"annotations", "id", "refusal"}),
)
