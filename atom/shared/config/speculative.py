"""Speculative decoding."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

_MODELS = ("mtp", "draft_model", "eagle3")


@dataclass(frozen=True)
class SpeculativeConfig:
    method: Literal["ngram", "mtp", "draft_model", "eagle3"] | None = None
    """Propose tokens that the model verifies in one step: ngram from the text so far, mtp by the checkpoint's
    layer for multi-token prediction, draft_model by a smaller model, eagle3 by a head on hidden states."""
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=32)] = 0
    """Draft tokens of each sequence in a step; needed with --method."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Longest n-gram that ngram looks up. If unset: --prompt-lookup-min, or 5."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Shortest n-gram that ngram looks up. If unset: --prompt-lookup-max, or 5."""
    spec_decode_adaptive: bool = True
    """Have fewer drafts, or none for a while, where the model accepts too few of them; changes no token."""
    draft_model: str | None = None
    """Directory of the checkpoint that drafts: for draft_model a model with the same tokenizer, for eagle3 a
    head that was trained for the model."""

    @property
    def runs_model(self) -> bool:
        """Whether a model proposes the tokens."""
        return self.method in _MODELS

    @property
    def reads_next_ids(self) -> bool:
        """Whether the drafting model computes a token together with the one after it."""
        return self.method in ("mtp", "eagle3")

    @property
    def lookahead(self) -> int:
        """Positions that the drafting model computes, besides those that the next step computes at least."""
        if not self.runs_model:
            return 0
        return self.num_speculative_tokens - self.reads_next_ids
