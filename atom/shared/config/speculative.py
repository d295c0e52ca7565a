"""Speculative decoding."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


@dataclass(frozen=True)
class SpeculativeConfig:
    method: Literal["ngram"] | None = None
    """Propose tokens that the model verifies in one step. ngram takes them from the text so far."""
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=32)] = 0
    """Draft tokens of each sequence in a step; needed with --method."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Longest n-gram that ngram looks up. If unset: --prompt-lookup-min, or 5."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Shortest n-gram that ngram looks up. If unset: --prompt-lookup-max, or 5."""
    spec_decode_adaptive: bool = True
    """Have fewer drafts, or none for a while, where the model accepts too few of them; changes no token."""
