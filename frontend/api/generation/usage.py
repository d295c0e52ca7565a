"""Token counts and times of one request."""

import msgspec

from frontend.api.schemas.generation import CompletionTokensDetails, PromptTokensDetails, Usage
from frontend.engine_client.streams import Stream
from frontend.text.output_processor import SequenceOutput

__all__ = ["UsageCounter"]

_DIGITS = 6  # microseconds


class UsageCounter:
    """Counts over all choices of one HTTP request; `started` is its arrival (monotonic, seconds)."""

    def __init__(self, prompt_tokens: int, choices: int, n: int, started: float):
        self._prompt_tokens = prompt_tokens
        self._tokens = [0] * choices
        self._started_choices = [False] * choices
        self._num_started = 0
        self._cached = 0
        self._reasoning = 0
        self._num_proposed = 0
        self._num_accepted = 0
        self._n = n
        self._started = started

    def is_first(self, index: int) -> bool:
        """Whether choice `index` has had no update yet."""
        return not self._started_choices[index]

    @property
    def have_all_started(self) -> bool:
        """Whether every choice has had an update."""
        return self._num_started == len(self._started_choices)

    def count(self, index: int, update: SequenceOutput) -> None:
        """Count one update of choice `index`."""
        self._num_started += not self._started_choices[index]
        self._started_choices[index] = True
        self._tokens[index] += len(update.token_ids)
        self._reasoning += update.num_reasoning
        self._num_proposed += update.num_proposed
        self._num_accepted += update.num_accepted
        # The sequences of one prompt share its tokens, so cached tokens count once per prompt.
        if index % self._n == 0:
            self._cached += update.cached_tokens

    def usage(self, stream: Stream) -> Usage:
        """The usage up to now."""
        tokens = sum(self._tokens)
        decoded = max(self._tokens) - 1
        decoding_s = stream.last_token_at - stream.first_token_at
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=tokens,
            total_tokens=self._prompt_tokens + tokens,
            prompt_tokens_details=PromptTokensDetails(self._cached),
            completion_tokens_details=self._details(),
            ttft_s=self._since_start(stream.first_token_at),
            tpot_s=round(decoding_s / decoded, _DIGITS) if decoded > 0 else 0.0,
            latency_s=self._since_start(stream.last_token_at),
        )

    def _details(self) -> CompletionTokensDetails | msgspec.UnsetType:
        if not self._num_proposed:
            return CompletionTokensDetails(self._reasoning) if self._reasoning else msgspec.UNSET
        rejected = self._num_proposed - self._num_accepted
        return CompletionTokensDetails(self._reasoning, self._num_accepted, rejected)

    def _since_start(self, moment: float) -> float:
        return round(max(moment - self._started, 0.0), _DIGITS)
