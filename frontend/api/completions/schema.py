"""POST /v1/completions."""

from typing import Literal

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

__all__ = [
    "COMPLETIONS",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionRequest",
    "CompletionResponse",
]


class CompletionRequest(GenerationRequest, kw_only=True):
    """Prompts: one text, a list of texts, one list of token ids, or a list of such lists."""

    prompt: str | list[str | int | list[int]] | None = None
    suffix: str | None = None
    """The text after the output, for models that can fill in the middle."""
    logprobs: int | None = None
    """Number of top tokens per generated token."""
    best_of: int | None = None
    """Must equal `n`: all choices are returned."""


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Columns with one entry per token; with `echo` the prompt tokens come first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first prompt token."""
    top_logprobs: list[dict[str, float] | None]
    """The token itself and the top tokens. Tokens with the same text (parts of characters) share one
    entry with the highest probability."""
    text_offset: list[int]
    """Offset of each token in the choice's text, in characters."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One of the `n` completions of one prompt; the choices of prompt p begin at index p * n."""

    index: int
    text: str
    finish_reason: str
    raw_finish_reason: str
    stop_reason: str | int | None = None
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """With `return_token_ids`, or without a tokenizer: the generated ids, including the stop token."""
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[PromptLogprob | None] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a non-streaming response."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: KVTransferParams | msgspec.UnsetType | None = msgspec.UNSET
    """With do_remote_decode: what a router sends on to the server that generates; null if nothing is kept."""
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


COMPLETIONS = Schema(
    CompletionRequest,
    neutral=NEUTRAL | {"prompt_embeds": ()},
    harmless=HARMLESS,
    harmless_types=HARMLESS_TYPES,
    nested=NESTED,
)
