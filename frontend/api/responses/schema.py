"""POST /v1/responses and /v1/responses/input_tokens, in OpenAI's format."""

from typing import Any, Literal

import msgspec

from frontend.api.schemas.fields import Schema
from frontend.api.schemas.generation import HARMLESS, HARMLESS_TYPES, Metadata, StreamOptions

__all__ = [
    "CUSTOM_TOOL",
    "INPUT_TOKENS",
    "ITEMS",
    "PARTS",
    "RESPONSES",
    "TOOL",
    "CustomCallItem",
    "FunctionCallItem",
    "FunctionOutputItem",
    "InputTokens",
    "InputTokensRequest",
    "MessageItem",
    "ReasoningItem",
    "Response",
    "ResponseUsage",
    "ResponsesRequest",
    "TextPart",
]


class Reasoning(msgspec.Struct, frozen=True):
    """Whether and how much the model reasons."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    """There are no summaries: the reasoning is returned as it is."""


class TextConfig(msgspec.Struct, frozen=True):
    """The form of the text."""

    format: dict[str, Any] | None = None


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """A conversation as a text or a list of items."""

    model: str | None = None
    input: str | list[msgspec.Raw] | None = None
    instructions: str | None = None
    """A system message before the conversation."""
    previous_response_id: str | None = None
    """The conversation continues that of a stored response."""
    tools: list[msgspec.Raw] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    """A conversation, and how to continue it."""

    store: bool | None = None
    """Keep the response; defaults to true."""
    include: list[str] | None = None
    metadata: Metadata | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    priority: int | None = None
    data_parallel_rank: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class MessageItem(msgspec.Struct, frozen=True):
    """A message."""

    role: str
    content: str | list[msgspec.Raw]
    type: str | None = None


class FunctionCallItem(msgspec.Struct, frozen=True):
    """A call that the model made."""

    type: str
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(msgspec.Struct, frozen=True):
    """The result of a call."""

    type: str
    call_id: str
    output: str | list[msgspec.Raw]


class CustomCallItem(msgspec.Struct, frozen=True):
    """A call of a custom tool."""

    type: str
    call_id: str
    name: str
    input: str


class ReasoningItem(msgspec.Struct, frozen=True):
    """Reasoning of an earlier reply."""

    type: str
    summary: list[msgspec.Raw] | None = None
    content: list[msgspec.Raw] | None = None
    encrypted_content: str | None = None
    """As this server returns it, for clients that keep nothing else."""


class TextPart(msgspec.Struct, frozen=True):
    """Text of a message, a result or reasoning."""

    type: str
    text: str


class ImagePart(msgspec.Struct, frozen=True):
    """An image of a message or a result."""

    type: str
    image_url: str
    """A data: URL."""
    detail: str | None = None


class Tool(msgspec.Struct, frozen=True):
    """A function."""

    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(msgspec.Struct, frozen=True):
    """A function whose only argument is a text."""

    type: str
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None
    """The form of the text, which is not enforced."""


class CachedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(msgspec.Struct, frozen=True):
    """Output tokens by kind."""

    reasoning_tokens: int


class InputTokens(msgspec.Struct, frozen=True):
    """How many tokens the prompt of a response would have."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseUsage(msgspec.Struct, frozen=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int

    @classmethod
    def of(cls, prompt: int, cached: int, output: int, reasoning: int) -> "ResponseUsage":
        """The usage of a response with these numbers of tokens."""
        return cls(prompt, CachedTokens(cached), output, ReasoningTokens(reasoning), prompt + output)


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The response, complete or in its present state."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: msgspec.Raw
    max_output_tokens: int | None
    metadata: msgspec.Raw
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float | None
    text: msgspec.Raw
    tool_choice: msgspec.Raw
    tools: msgspec.Raw
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


_OBJECT = frozenset({"id", "status"})
_NESTED: dict[str, Schema[Any] | None] = {
    "reasoning": Schema(Reasoning, {"generate_summary": ("auto",)}, frozenset()),
    "text": Schema(TextConfig, {"verbosity": ("medium",)}, frozenset(), {"format": None}),
    "tool_choice": None,
}

RESPONSES = Schema(
    ResponsesRequest,
    neutral={
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "moderation": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
    harmless=(HARMLESS - {"metadata", "store"}) | {"max_tool_calls"},
    nested=_NESTED | {"metadata": None, "stream_options": Schema(StreamOptions, {}, frozenset())},
    harmless_types=HARMLESS_TYPES,
    state=frozenset({"conversation"}),
    instead={"background": "use 'stream', with the header X-Resumable-Stream to resume it"},
)
INPUT_TOKENS = Schema(
    InputTokensRequest,
    neutral={"conversation": (), "personality": (), "truncation": ("disabled",)},
    harmless=frozenset(),
    nested=_NESTED,
    state=frozenset({"conversation"}),
)
ITEMS: dict[str, Schema[Any]] = {
    "message": Schema(MessageItem, {}, _OBJECT | {"phase"}),
    "function_call": Schema(FunctionCallItem, {"namespace": ()}, _OBJECT | {"caller", "async"}),
    "function_call_output": Schema(FunctionOutputItem, {}, _OBJECT | {"caller"}),
    "custom_tool_call": Schema(CustomCallItem, {"namespace": ()}, _OBJECT | {"caller", "async"}),
    "custom_tool_call_output": Schema(FunctionOutputItem, {}, _OBJECT | {"caller"}),
    "reasoning": Schema(ReasoningItem, {}, _OBJECT),
}
"""By the type of an item of the input."""
PARTS = Schema(TextPart, {}, frozenset({"annotations", "logprobs"}))
IMAGE_PART = Schema(ImagePart, {"file_id": ()}, frozenset())
TOOL = Schema(Tool, {"defer_loading": (False,)}, frozenset())
CUSTOM_TOOL = Schema(CustomTool, {"defer_loading": (False,)}, frozenset(), {"format": None})
