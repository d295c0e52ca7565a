"""A step of the workers: its plan, its requests while it is in flight, and its outcome."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add, le

from atom.shared.messages.engine import Finished, FirstToken, PromptLogprobs, unpack_ids
from atom.shared.messages.worker import BatchResult, MoreBlocks, NewRow, RowFailure
from engine_core.batch.batch_bytes import MAX_PROMPT_LOGPROB_TOKENS
from engine_core.batch.sampled_tokens import SampledTokens, fits, is_consistent
from engine_core.requests.request import Request, State


@dataclass(slots=True)
class StepPlan:
    """The step that a `schedule` call has planned so far; a preemption removes its request again."""

    chunks: dict[int, tuple[Request, int]] = field(default_factory=dict)
    """Tokens to compute of each request outside the decode batch, by request id."""
    more_blocks: dict[int, MoreBlocks] = field(default_factory=dict)
    new_rows: list[NewRow] = field(default_factory=list)
    new_row_bytes: int = 0
    num_tokens: int = 0
    """Tokens of all chunks."""
    prompt_logprob_tokens: int = MAX_PROMPT_LOGPROB_TOKENS
    """Tokens that may still be computed of prompts with log probabilities."""
    preempted: bool = False

    def add_chunk(self, request: Request, count: int) -> None:
        """Compute `count` tokens of a request."""
        self.chunks[request.request_id] = request, count
        self.num_tokens += count
        if request.prompt_logprobs >= 0:
            self.prompt_logprob_tokens -= count

    def remove(self, request: Request) -> None:
        """Take a preempted request out of the step."""
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

    def packed_ids(self, all_next: bool = False) -> tuple[bytes, bytes]:
        """`token_ids` and `next_ids` of the batch; call it before the chunks count as computed.

        `all_next`: with the id after every chunk that is not the request's last.
        """
        ids = []
        following = []
        for request, count in self.chunks.values():
            end = request.num_computed_tokens + count
            ids.append(request.token_ids.packed(request.num_computed_tokens, end))
            last = request.num_tokens if all_next else request.prompt_length
            if (all_next or request.prompt_logprobs >= 0) and end < last:
                following.append(request.token_ids.packed(end, end + 1))
        return b"".join(ids), b"".join(following)


@dataclass(slots=True)
class Step:
    """A step in flight."""

    number: int
    rows: list[int]
    requests: list[Request]
    """`requests[i]` has `rows[i]`; the row may belong to another request when the result arrives."""
    sampling: list[Request]
    """Requests that sample a token, in batch order."""
    stop_ids: frozenset[int] | None
    """All ids that end one of `sampling`; None where they are too many to collect."""
    prefilled: list[Request]
    """The requests of `sampling` whose prefill this step finishes."""
    ending: list[Request]
    """The requests of `sampling` that reach their length limit."""
    prompt_logprob_rows: dict[int, Request]
    """By row, the requests that get log probabilities of their prompt."""
    has_chunks: bool
    sent_at: float
    num_drafts: int = 0
    """Drafts of each decoding request."""
    is_stale: bool = False
    """Whether sampled tokens of some requests must be dropped."""

    def failed_requests(self, result: BatchResult) -> list[tuple[Request, RowFailure]]:
        """Requests whose rows failed, with the failures. Raises ValueError for rows of other steps."""
        if not result.failed:
            return []
        request_of = dict(zip(self.rows, self.requests, strict=True))
        failures = {failure.row: failure for failure in result.failed}
        if not failures.keys() <= request_of.keys():
            raise ValueError(f"step {self.number} reports failures of rows that it did not run")
        return [(request_of[row], failure) for row, failure in failures.items()]

    def late_requests(self, result: BatchResult) -> list[Request]:
        """Requests whose rows were late. Raises ValueError for rows that did not sample in this step."""
        if not result.late:
            return []
        sampling = set(map(id, self.sampling))
        request_of = {row: r for row, r in zip(self.rows, self.requests, strict=True) if id(r) in sampling}
        if not request_of.keys() >= set(result.late):
            raise ValueError(f"step {self.number} reports late rows that it did not sample")
        return [request_of[row] for row in result.late]

    def sampled(self, result: BatchResult, failed: set[int]) -> SampledTokens:
        """The result's tokens, except dropped ones; `failed` has the `id()` of each failed or late request.

        Raises ValueError for a result that does not fit the step.
        """
        requests = self.sampling
        if failed:
            requests = [request for request in requests if id(request) not in failed]
        counts, num_proposed = self._counts(result, requests, failed) if self.num_drafts else ((), ())
        if not self.num_drafts and (result.counts or result.num_proposed):
            raise ValueError(f"step {self.number} returned counts, and it had no drafts")
        ids = unpack_ids(result.token_ids)
        num_tokens = sum(counts) if counts else len(requests)
        if len(ids) != num_tokens:
            raise ValueError(f"step {self.number} returned {len(ids)} tokens for {len(requests)} rows")
        if result.logprobs is not None and not fits(result.logprobs, num_tokens):
            raise ValueError(
                f"step {self.number} returned log probabilities that do not fit its sampled tokens"
            )
        tokens = SampledTokens(requests, ids, result.logprobs, counts, num_proposed)
        if not self.is_stale:
            return tokens
        return tokens.select([i for i, request in enumerate(requests) if self.is_valid_for(request)])

    def _counts(
        self, result: BatchResult, requests: list[Request], failed: set[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Sampled tokens and verified drafts of each row of a step with drafts.

        Raises ValueError for numbers that do not fit the step.
        """
        num_rows = len(requests)
        num_decodes = num_rows - sum(id(request) not in failed for request in self.prefilled)
        ones = array("i", [1]) * num_rows
        counts = unpack_ids(result.counts) if result.counts else ones
        proposed = unpack_ids(result.num_proposed) if result.num_proposed else array("i", [0]) * num_rows
        if (
            not len(counts) == len(proposed) == num_rows
            or min(counts, default=1) < 1
            or not all(map(le, counts, map(add, ones, proposed)))
            or max(proposed, default=0) > self.num_drafts
            or any(proposed[num_decodes:])
        ):
            raise ValueError(f"step {self.number} returned counts that do not fit its rows")
        return counts, proposed

    def is_valid_for(self, request: Request) -> bool:
        """Whether this step's output for the request is used: it has neither ended nor been recomputed."""
        return request.state is not State.ENDED and request.discarded_until < self.number

    def prompt_logprobs(self, result: BatchResult) -> list[tuple[Request, PromptLogprobs]]:
        """The result's prompt log probabilities, under the ids of requests that have not ended.

        Raises ValueError for a chunk that fits no row.
        """
        found = []
        for chunk in result.prompt_logprobs:
            request = self.prompt_logprob_rows.get(chunk.owner)
            if request is None or not is_consistent(chunk.table):
                raise ValueError(f"step {self.number} returned prompt log probabilities that fit no row")
            if self.is_valid_for(request):
                found.append((request, PromptLogprobs(request.request_id, chunk.start, chunk.table)))
        return found


@dataclass(slots=True, frozen=True)
class StepOutcome:
    """What one step's result changes for the requests."""

    step: int
    sampled: SampledTokens
    first: list[tuple[Request, FirstToken]]
    finished: list[tuple[Request, Finished]]
    prompt_logprobs: list[tuple[Request, PromptLogprobs]]

    @property
    def has_output(self) -> bool:
        """Whether there is anything to send: a step of prompt chunks alone usually has no output."""
        return bool(self.sampled.requests or self.finished or self.prompt_logprobs)
