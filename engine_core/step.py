"""A step of the workers: the plan that becomes a batch, what its result will mean, and the outcome."""

from dataclasses import dataclass, field

from atom.messages.engine import Finished, FirstToken, PromptLogprobs, unpack_ids
from atom.messages.worker import BatchResult, MoreBlocks, NewRow
from engine_core.batch_bytes import MAX_PROMPT_LOGPROB_TOKENS
from engine_core.request import Request, State
from engine_core.sampled_tokens import SampledTokens, fits, is_whole


@dataclass(slots=True)
class StepPlan:
    """What one `schedule` call has decided so far; a preemption removes its request again."""

    chunks: dict[int, tuple[Request, int]] = field(default_factory=dict)
    """Tokens to compute of each request outside the decode batch, by request id."""
    more_blocks: dict[int, MoreBlocks] = field(default_factory=dict)
    new_rows: list[NewRow] = field(default_factory=list)
    new_row_bytes: int = 0
    num_tokens: int = 0
    """Of all chunks."""
    prompt_logprob_tokens: int = MAX_PROMPT_LOGPROB_TOKENS
    """Tokens that may still be computed of prompts whose log probabilities are wanted."""
    preempted: bool = False

    def add_chunk(self, request: Request, count: int) -> None:
        """Compute `count` tokens of a request."""
        self.chunks[request.request_id] = request, count
        self.num_tokens += count
        if request.prompt_logprobs >= 0:
            self.prompt_logprob_tokens -= count

    def remove(self, request: Request) -> None:
        """The request is preempted."""
        self.preempted = True
        self.more_blocks.pop(request.request_id, None)
        if request.request_id in self.chunks:
            _, count = self.chunks.pop(request.request_id)
            self.num_tokens -= count
            if request.prompt_logprobs >= 0:
                self.prompt_logprob_tokens += count

    def chunk_limit(self, request: Request, budget: int) -> int:
        """The most tokens of a request that this step may compute."""
        return min(budget, self.prompt_logprob_tokens) if request.prompt_logprobs >= 0 else budget

    def packed_ids(self) -> tuple[bytes, bytes]:
        """`token_ids` and `next_ids` of the batch; the chunks are not yet counted as computed."""
        ids, following = [], []
        for request, count in self.chunks.values():
            end = request.computed + count
            ids.append(request.token_ids.packed(request.computed, end))
            if request.prompt_logprobs >= 0 and end < request.prompt_length:
                following.append(request.token_ids.packed(end, end + 1))
        return b"".join(ids), b"".join(following)


@dataclass(slots=True)
class Step:
    """A batch in flight."""

    number: int
    rows: list[int]
    requests: list[Request]
    """`requests[i]` has `rows[i]`; the row may be another request's when the result comes."""
    sampling: list[Request]
    """Requests that sample a token, in batch order."""
    stop_ids: frozenset[int] | None
    """All ids that end one of `sampling`; None where they are too many to collect."""
    prefilled: list[Request]
    """Those of `sampling` whose last known token is computed by this step."""
    ending: list[Request]
    """Those of `sampling` that reach their length limit."""
    prompt_logprob_rows: dict[int, Request]
    """By row, the requests that get log probabilities of their prompt."""
    has_chunks: bool
    sent_at: float
    is_stale: bool = False
    """Tokens of some of `sampling` are to be dropped."""

    def failed_requests(self, result: BatchResult) -> list[tuple[Request, str]]:
        """The requests whose rows failed, and why. Raises ValueError for rows that are not in the step."""
        if not result.failed:
            return []
        request_of = dict(zip(self.rows, self.requests, strict=True))
        reasons = {failure.row: failure.reason for failure in result.failed}
        if not reasons.keys() <= request_of.keys():
            raise ValueError(f"step {self.number} reports failures of rows that it does not have")
        return [(request_of[row], reason) for row, reason in reasons.items()]

    def sampled(self, result: BatchResult, failed: set[int]) -> SampledTokens:
        """The result's tokens, except those to be dropped; `failed` has the `id()` of each failed request.

        Raises ValueError for a result that does not fit the step.
        """
        requests = self.sampling
        if failed:
            requests = [request for request in requests if id(request) not in failed]
        tokens = SampledTokens(requests, unpack_ids(result.token_ids), result.logprobs)
        if len(tokens.token_ids) != len(requests):
            raise ValueError(
                f"step {self.number} gave {len(tokens.token_ids)} tokens for {len(requests)} rows"
            )
        if tokens.logprobs is not None and not fits(tokens.logprobs, len(requests)):
            raise ValueError(f"step {self.number} gave log probabilities that do not fit its sampled tokens")
        if not self.is_stale:
            return tokens
        return tokens.select([place for place, request in enumerate(requests) if self.is_valid_for(request)])

    def is_valid_for(self, request: Request) -> bool:
        """Whether the request still wants what this step sampled for it."""
        return request.state is not State.ENDED and request.discarded_until < self.number

    def prompt_logprobs(self, result: BatchResult) -> list[tuple[Request, PromptLogprobs]]:
        """The result's prompt log probabilities, under the ids of requests that have not ended.

        Raises ValueError for a chunk that fits no row.
        """
        found = []
        for chunk in result.prompt_logprobs:
            request = self.prompt_logprob_rows.get(chunk.owner)
            if request is None or not is_whole(chunk.table):
                raise ValueError(f"step {self.number} gave prompt log probabilities that fit no row")
            if self.is_valid_for(request):
                found.append((request, PromptLogprobs(request.request_id, chunk.start, chunk.table)))
        return found


@dataclass(slots=True, frozen=True)
class StepOutcome:
    """What one step's result means for the requests."""

    step: int
    sampled: SampledTokens
    first: list[tuple[Request, FirstToken]]
    finished: list[tuple[Request, Finished]]
    prompt_logprobs: list[tuple[Request, PromptLogprobs]]

    @property
    def has_output(self) -> bool:
        """Whether frontends get anything: a step of prompt chunks alone usually has nothing."""
        return bool(self.sampled.requests or self.finished or self.prompt_logprobs)
