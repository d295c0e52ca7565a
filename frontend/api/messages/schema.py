"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's format."""

from typing import Any, Literal

import msgspec

from frontend.api.schemas.fields import Schema

__all__ = [
    "BLOCKS",
    "COUNT",
    "MESSAGES",
    "TOOL",
    "TURN",
    "CountRequest",
    "CountResponse",
    "MessagesRequest",
    "MessagesResponse",
    "MessagesUsage",
    "RedactedThinkingBlock",
    "TextBlock",
    "Thinking",
    "ThinkingBlock",
    "ToolResultBlock",
    "ToolUseBlock",
]


class Thinking(msgspec.Struct, frozen=True):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    """A target, which is not enforced."""


class OutputFormat(msgspec.Struct, frozen=True):
    """What the text of the answer must be."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """How the model answers."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """A conversation."""

    model: str | None = None
    messages: list[msgspec.Raw]
    system: str | list[msgspec.Raw] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None
    """Only edits that remove the reasoning of earlier turns, which chat templates do anyway."""


class MessagesRequest(CountRequest, kw_only=True):
    """A conversation, and how to continue it."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    min_p: float | None = None
    seed: int | None = None
    priority: int | None = None
    data_parallel_rank: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class Turn(msgspec.Struct, frozen=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[msgspec.Raw]


class TextBlock(msgspec.Struct, frozen=True):
    """Text."""

    type: str
    text: str


class ImageSource(msgspec.Struct, frozen=True):
    """A file in base64, or where one is."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(msgspec.Struct, frozen=True):
    """An image."""

    type: str
    source: ImageSource


class ToolUseBlock(msgspec.Struct, frozen=True):
    """A call that the model made."""

    type: str
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, frozen=True):
    """The result of a call."""

    type: str
    tool_use_id: str
    content: str | list[msgspec.Raw] | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, frozen=True):
    """Reasoning of an earlier turn."""

    type: str
    thinking: str


class RedactedThinkingBlock(msgspec.Struct, frozen=True):
    """Encrypted reasoning of another model, which no other model can read."""

    type: str
    data: str


class Tool(msgspec.Struct, frozen=True):
    """A function; `input_schema` is the JSON schema of its arguments."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: str | None = None


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. The prompt has input_tokens + cache_read_input_tokens."""

    input_tokens: int
    """Prompt tokens that were not in the prefix cache."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    """Prompt tokens from the prefix cache."""
    output_tokens: int


class MessagesResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a non-streaming response."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class CountResponse(msgspec.Struct, frozen=True):
    """The number of prompt tokens."""

    input_tokens: int


_CACHE = frozenset({"cache_control"})
_STATE = frozenset({"thread"})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "speed": ("standard",),
    "container": (),
    **dict.fromkeys(_STATE, ()),
}
_HARMLESS = _CACHE | {
    "anthropic_beta",
    "diagnostics",
    "inference_geo",
    "metadata",
    "service_tier",
    "user_profile_id",
    "workspace_id",
}
_NESTED: dict[str, Schema[Any] | None] = {
    "context_management": None,
    "output_config": Schema(
        OutputConfig, {}, frozenset(), {"format": Schema(OutputFormat, {}, frozenset(), {"schema": None})}
    ),
    "thinking": Schema(Thinking, neutral={"display": ("summarized",)}, harmless=frozenset()),
    "tool_choice": None,
}

MESSAGES = Schema(MessagesRequest, _NEUTRAL, _HARMLESS, _NESTED, state=_STATE)
COUNT = Schema(CountRequest, _NEUTRAL, _HARMLESS, _NESTED, state=_STATE)
TURN = Schema(Turn, {}, frozenset())
BLOCKS: dict[str, Schema[Any]] = {
    "text": Schema(TextBlock, {"citations": ([],)}, _CACHE),
    "image": Schema(ImageBlock, {}, _CACHE, {"source": Schema(ImageSource, {}, frozenset())}),
    "tool_use": Schema(ToolUseBlock, {}, _CACHE | {"caller"}),
    "tool_result": Schema(ToolResultBlock, {}, _CACHE),
    "thinking": Schema(ThinkingBlock, {}, _CACHE | {"signature"}),
    "redacted_thinking": Schema(RedactedThinkingBlock, {}, _CACHE),
}
"""By the type of a content block."""
TOOL = Schema(
    Tool,
    {"allowed_callers": (["direct"],), "defer_loading": (False,), "input_examples": ([],)},
    _CACHE | {"eager_input_streaming"},
)
