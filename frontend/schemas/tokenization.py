"""POST /tokenize and /detokenize, as vLLM lays them out."""

from typing import Any

import msgspec

from frontend.schemas.fields import Schema

__all__ = [
    "DETOKENIZE",
    "TOKENIZE",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "TokenizeRequest",
    "TokenizeResponse",
]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either a text in `prompt`, or a conversation in `messages`, which goes through the template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[msgspec.Raw] | None = None
    add_special_tokens: bool | None = None
    """Whether the text gets what prompts of the model begin and end with; true for `prompt` and
    false for `messages`, whose template writes them itself."""
    return_token_strs: bool | None = None
    """Give each token's own text too: as it reads, where vLLM shows the vocabulary's spelling."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The ids, and how many a request may have with its answer."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Ids of the vocabulary."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """Their text, special tokens included."""

    prompt: str


TOKENIZE = Schema(
    TokenizeRequest,
    neutral={"chat_template": (), "mm_processor_kwargs": ({},), "tools": ([],), "media_io_kwargs": ({},)},
    harmless=frozenset({"user"}),
)
DETOKENIZE = Schema(DetokenizeRequest, neutral={}, harmless=frozenset({"user"}))
