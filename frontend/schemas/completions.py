"""POST /v1/completions."""

from typing import Literal

import msgspec

from frontend.schemas.fields import Schema
from frontend.schemas.generation import HARMLESS, NEUTRAL, GenerationRequest, Usage

__all__ = ["COMPLETIONS", "CompletionAnswer", "CompletionChoice", "CompletionRequest"]


class CompletionRequest(GenerationRequest, kw_only=True):
    """Prompts: one text, a list of texts, one list of token ids, or a list of such lists."""

    prompt: str | list[str | int | list[int]] | None = None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the `n` continuations of one prompt; those of prompt p begin at index p * n."""

    index: int
    text: str
    finish_reason: str
    raw_finish_reason: str
    stop_reason: str | None = None
    logprobs: None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Where the model has no tokenizer: the answer itself."""


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a reply that is not streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


COMPLETIONS = Schema(
    CompletionRequest,
    neutral=NEUTRAL
    | {
        "best_of": (1,),
        "echo": (False,),
        "logprobs": (),
        "prompt_embeds": (),
        "suffix": ("",),
    },
    harmless=HARMLESS,
)
