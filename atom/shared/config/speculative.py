"""Speculative decoding."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

_TEXTS = ("ngram", "suffix")
_MODELS = ("mtp", "draft_model", "eagle3", "dflash", "dspark")


@dataclass(frozen=True)
class SpeculativeConfig:
    method: Literal["ngram", "suffix", "mtp", "draft_model", "eagle3", "dflash", "dspark"] | None = None
    """Propose tokens that the model verifies in one step: ngram from the text so far, suffix from it and from
    recent outputs, mtp by the checkpoint's layer for multi-token prediction, draft_model by a smaller model,
    eagle3 by a head on hidden states, dflash by a model that reads them and drafts a block in one pass,
    dspark by such a one whose drafts also depend on one another."""
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=32)] = 0
    """Draft tokens of each sequence in a step; needed with --method."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Longest n-gram that ngram looks up. If unset: --prompt-lookup-min, or 5."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Shortest n-gram that ngram looks up. If unset: --prompt-lookup-max, or 5."""
    spec_decode_adaptive: bool = True
    """Have fewer drafts, or none for a while, where the model accepts too few of them; changes no token."""
    draft_model: str | None = None
    """Directory of the checkpoint that drafts, or its name on the hub: for draft_model a model with the same
    tokenizer, for eagle3 a head, for dflash and dspark a block drafter; both were trained for the model."""
    spec_decode_acceptance_length: Annotated[float, Meta(ge=1)] | None = None
    """For benchmarks with random weights: each step accepts as many drafts as give this many tokens a step on
    average, whatever the model samples. The text is not the model's."""
    spec_decode_acceptance_rate: Annotated[float, Meta(ge=0, le=1)] | None = None
    """The same as a fraction of --num-speculative-tokens."""

    @property
    def forced_length(self) -> float | None:
        """Mean tokens of a step whose acceptance is forced; None: drafts are verified."""
        if self.spec_decode_acceptance_rate is not None:
            return 1 + self.spec_decode_acceptance_rate * self.num_speculative_tokens
        return self.spec_decode_acceptance_length

    @property
    def reads_text(self) -> bool:
        """Whether the tokens come from a text, to which a request's prediction is added."""
        return self.method in _TEXTS

    @property
    def runs_model(self) -> bool:
        """Whether a model proposes the tokens."""
        return self.method in _MODELS

    @property
    def has_draft_model(self) -> bool:
        """Whether that model is the one of --draft-model."""
        return self.runs_model and self.method != "mtp"

    @property
    def reads_next_ids(self) -> bool:
        """Whether the drafting model computes a token together with the one after it."""
        return self.method in ("mtp", "eagle3")

    @property
    def lookahead(self) -> int:
        """Positions that the drafting model computes, besides those that the next step computes at least."""
        if not self.runs_model:
            return 0
        return self.num_speculative_tokens + (self.method == "dflash") - self.reads_next_ids

    @property
    def reads_images(self) -> bool:
        """Whether what drafts sees the images of prompts, or reads the text alone without a model."""
        return not self.has_draft_model

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the drafting model reads hidden states of layers within the model."""
        return self.method == "eagle3" or self.drafts_blocks

    @property
    def drafts_blocks(self) -> bool:
        """Whether the drafting model computes all drafts of a sequence in one pass."""
        return self.method in ("dflash", "dspark")
