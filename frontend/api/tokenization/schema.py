"""POST /tokenize and /detokenize, in vLLM's format."""

from typing import Any

import msgspec

from frontend.api.schemas.fields import Schema

__all__ = [
    "DETOKENIZE",
    "TOKENIZE",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "TokenizeRequest",
    "TokenizeResponse",
]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either a text in `prompt`, or a conversation in `messages` for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[msgspec.Raw] | None = None
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as BOS; defaults to true for `prompt` and to false for
    `messages`, whose template adds them."""
    return_token_strs: bool | None = None
    """Also return each token's text: decoded, while vLLM returns the vocabulary entry."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[msgspec.Raw] | None = None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids, and the context length."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """The text, including special tokens."""

    prompt: str


TOKENIZE = Schema(
    TokenizeRequest,
    neutral={"chat_template": (), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},)},
    harmless=frozenset({"user"}),
)
DETOKENIZE = Schema(DetokenizeRequest, neutral={}, harmless=frozenset({"user"}))
