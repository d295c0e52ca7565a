"""Results of the library."""

from dataclasses import dataclass, field
from typing import Any

Logprobs = dict[int, float]
"""Log probabilities by token id: the sampled token first, then the most likely ones."""


@dataclass(slots=True)
class RequestOutput:
    """New output of one sequence."""

    request_id: int | str
    """The id that `LLMEngine.add_request` has returned, or the one given to `AsyncLLMEngine.generate`."""
    output_tokens: list[int] = field(default_factory=list)
    """Ids since the last output."""
    text: str = ""
    """Text since the last output."""
    finished: bool = False
    finish_reason: str | None = None
    """Raw: eos, stop_<id>, stop_sequence, max_tokens, aborted or error."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    logprobs: list[Logprobs] = field(default_factory=list)
    """Log probabilities of the tokens of `text`, when requested."""
    index: int = 0
    """Number of the sequence among the `n` of its request."""


@dataclass(slots=True)
class Sequence:
    """One sequence of one request, from its submission to its end. Times are in seconds."""

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    error: str = ""
    """The error message, when `finish_reason` is error."""
    logprobs: list[Logprobs] | None = None
    """One for each of `token_ids`, when requested."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """One for each of `prompt_token_ids`, when requested; None for the first token."""
    submitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.first_token - self.submitted

    @property
    def latency(self) -> float:
        """Time to the last token."""
        return self.finished - self.submitted

    @property
    def tpot(self) -> float:
        """Time for each token after the first; 0 for a single one."""
        later = len(self.token_ids) - 1
        return (self.finished - self.first_token) / later if later > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The form that `LLMEngine.generate` returns; log probabilities only when requested."""
        fields: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "latency": self.latency,
            "finish_reason": self.finish_reason,
            "num_tokens_input": len(self.prompt_token_ids),
            "num_tokens_output": len(self.token_ids),
            "ttft": self.ttft,
            "tpot": self.tpot,
        }
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self.prompt_logprobs
        return fields
