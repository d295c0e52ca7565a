"""The decode batch with drafts: requests that each compute their last token and a step's `num_drafts` drafts.

A step advances a request by one token and by its accepted drafts. How many these are is known when the
result arrives, and by then the next step is scheduled. So `num_computed_tokens` is the most that a
request may have computed, and the request counts how many of these are drafts in flight:

    position     0 ........ 19 | 20 21 22 23 | 24 25 26 27 | 28 ...
                 computed      | in flight   | next step   |
                               least = 21    num_computed_tokens = 24

The next step begins at one of the positions least .. num_computed_tokens, and the blocks for all of them
are allocated. A result with m tokens takes 1 + num_drafts - m off `num_computed_tokens`. No position from
`max_length` on is ever computed. A model that drafts writes to `lookahead` more positions, which have
blocks, too.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from engine_core.batch.decode_batch import DecodeRows, decode_rows
from engine_core.requests.request import Request, State
from engine_core.step import Step


class DraftBatch:
    """The running requests that decode. `DecodeBatch` is the same for steps without drafts, and cheaper."""

    def __init__(self, block_size: int, num_drafts: int, lookahead: int = 0):
        self.num_drafts = num_drafts
        """Drafts of each request in the next step."""
        self._lookahead = lookahead
        self._block_size = block_size
        self._requests: dict[int, Request] = {}
        self._rows: DecodeRows | None = None

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def tokens_per_row(self) -> int:
        """Tokens that each request computes in the next step."""
        return 1 + self.num_drafts

    def requests(self) -> list[Request]:
        """All requests, in the order they joined."""
        return list(self._requests.values())

    def add(self, request: Request) -> None:
        """Decode from the next step on.

        `request.num_computed_tokens` are done or in flight, and at least one is left to sample.
        """
        request.drafts_in_flight = 0
        request.covered = self._covered(request, request.num_computed_tokens)
        self._requests[request.request_id] = request
        self._rows = None

    def remove(self, request: Request) -> None:
        """Stop decoding."""
        del self._requests[request.request_id]
        self._rows = None

    def num_covered(self, request: Request) -> int:
        """Tokens for which its blocks have room."""
        return request.covered

    def needing_block(self) -> list[tuple[Request, int, int]]:
        """Requests whose blocks do not cover the next step.

        With each the first position at which the step may begin, and the end of what it may write.
        """
        width = self.tokens_per_row + self._lookahead
        return [
            (
                request,
                request.num_computed_tokens - request.drafts_in_flight,
                min(request.num_computed_tokens + width, request.max_length),
            )
            for request in self._requests.values()
            if request.covered < request.num_computed_tokens + width and request.covered < request.max_length
        ]

    def advance(self) -> tuple[DecodeRows, list[Request]]:
        """Schedule a step of every request; returns the rows, and the requests that are ending then."""
        if self._rows is None:
            self._rows = decode_rows(list(self._requests.values()))
        rows = self._rows
        width = self.tokens_per_row
        num_drafts = self.num_drafts
        ending = []
        for request in rows.requests:
            computed = request.num_computed_tokens + width
            in_flight = request.drafts_in_flight + num_drafts
            request.num_computed_tokens = computed
            request.drafts_in_flight = in_flight
            if computed + self._lookahead > request.covered:
                request.covered = self._covered(request, computed)
            if computed - in_flight + 1 >= request.max_length:
                ending.append(request)
        for request in ending:
            self.remove(request)
        return rows, ending

    def correct(self, requests: Sequence[Request], counts: Sequence[int], num_drafts: int) -> list[int]:
        """Count only the accepted drafts of one step, whose result has `counts[i]` tokens of requests[i].

        Each of them had `num_drafts` drafts in that step.

        A preempted request needs no correction: it is recomputed. Returns the indices of the requests that
        may have ended with these tokens, or are ending now.
        """
        width = 1 + num_drafts
        ending = []
        for index, (request, count) in enumerate(zip(requests, counts, strict=True)):
            if request.state is State.WAITING:
                ending.append(index)
                continue
            computed = request.num_computed_tokens + count - width
            in_flight = request.drafts_in_flight - num_drafts
            request.num_computed_tokens = computed
            request.drafts_in_flight = in_flight
            if computed - in_flight + 1 >= request.max_length:
                ending.append(index)
        return ending

    def is_ending(self, request: Request) -> bool:
        """Whether it gets all its tokens from the steps in flight, even if no draft is accepted."""
        return request.num_computed_tokens - request.drafts_in_flight + 1 >= request.max_length

    def check_integrity(self, steps: Iterable[Step]) -> None:
        """Raises AssertionError unless the tokens of all requests fit one another and `steps` in flight."""
        sampled = Counter[int]()
        drafted = Counter[int]()
        for step in steps:
            sampled.update(map(id, step.sampling))
            for request in step.sampling if step.num_drafts else ():
                drafted[id(request)] += step.num_drafts
            for request in step.prefilled if step.num_drafts else ():
                drafted[id(request)] -= step.num_drafts
        for request in self._requests.values():
            least = request.num_computed_tokens - request.drafts_in_flight
            certain = request.num_tokens - 1 + sampled[id(request)]
            assert least == certain, f"{least} tokens are counted as certainly computed, not {certain}"
            in_flight = drafted[id(request)]
            assert request.drafts_in_flight == in_flight, f"{in_flight} drafts are in flight"
            assert not self.is_ending(request), "a request is past its last step"
            assert request.covered >= min(request.num_computed_tokens, request.max_length), (
                "drafts have no blocks"
            )

    def _covered(self, request: Request, num_tokens: int) -> int:
        """Tokens of the whole blocks that a request has with this many computed."""
        needed = min(num_tokens + self._lookahead, request.max_length)
        return -(-needed // self._block_size) * self._block_size
