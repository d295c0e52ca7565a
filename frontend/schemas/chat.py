"""POST /v1/chat/completions."""

from typing import Any, Literal

import msgspec

from frontend.schemas.fields import Schema
from frontend.schemas.generation import HARMLESS, NEUTRAL, GenerationRequest, Usage

__all__ = ["CHAT", "MESSAGE", "ChatAnswer", "ChatChoice", "ChatRequest", "Message", "Reply"]


class ChatRequest(GenerationRequest, kw_only=True):
    """A conversation; `prompt` is another name of `messages`."""

    messages: list[msgspec.Raw] | None = None
    prompt: list[msgspec.Raw] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


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


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the `n` replies."""

    index: int
    message: Reply
    finish_reason: str
    raw_finish_reason: str
    stop_reason: str | None = None
    logprobs: None = None


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a reply that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


CHAT = Schema(
    ChatRequest,
    neutral=NEUTRAL
    | {
        "add_generation_prompt": (True,),
        "audio": (),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "include_reasoning": (True,),
        "logprobs": (False,),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "moderation": (),
        "modalities": (["text"],),
        "reasoning": (),
        "reasoning_effort": (),
        "separate_reasoning": (False,),
        "stream_reasoning": (True,),
        "thinking": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
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
