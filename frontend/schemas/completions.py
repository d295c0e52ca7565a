"""POST /v1/completions."""

from typing import Literal

import msgspec

from frontend.schemas.fields import Schema
from frontend.schemas.generation import HARMLESS, NEUTRAL, GenerationRequest, PromptLogprob, Usage

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
    logprobs: int | None = None
    """How many of the most likely tokens beside each one."""
    best_of: int | None = None
    """Only `n` can be honoured: all choices are returned."""


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry a token, in columns; with `echo` the prompt's come first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for a prompt's first token, before which there is nothing."""
    top_logprobs: list[dict[str, float] | None]
    """The token itself and the most likely ones. Of several with the same text, which are parts
    of characters, the likeliest is shown."""
    text_offset: list[int]
    """Where each token's text begins in the choice's."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One of the `n` continuations of one prompt; those of prompt p begin at index p * n."""

    index: int
    text: str
    finish_reason: str
    raw_finish_reason: str
    stop_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Where asked for, and where the model has no tokenizer: the generated ids, with the one that
    ended the choice."""
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[PromptLogprob | None] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a reply that is not streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


COMPLETIONS = Schema(
    CompletionRequest,
    neutral=NEUTRAL
    | {
        "prompt_embeds": (),
        "suffix": ("",),
    },
    harmless=HARMLESS,
)
