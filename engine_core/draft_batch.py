"""The decode batch with drafts: requests that each compute their last token and `num_drafts` drafts.

A step advances a request by one token and by its accepted drafts. How many these are is known when the
result arrives, and by then the next step is scheduled. So a request counts the most that it may have
computed, and how many drafts of that are still in flight:

    position     0 ........ 19 | 20 21 22 23 | 24 25 26 27 | 28 ...
                 computed      | in flight   | next step   |
                               least = 21    computed = 24

The next step begins at one of the positions least .. computed, and the blocks for all of them are
allocated. A result with m tokens takes 1 + num_drafts - m off `computed`. No position from `max_length` on
is ever computed.
"""

from engine_core.decode_batch import DecodeRows, decode_rows
from engine_core.request import Request


class DraftBatch:
    """The running requests that decode. `DecodeBatch` is the same for steps without drafts, and cheaper."""

    def __init__(self, block_size: int, num_drafts: int):
        self.tokens_per_row = 1 + num_drafts
        """Tokens that each request computes in a step."""
        self.num_drafts = num_drafts
        self._block_size = block_size
        self._requests: dict[int, Request] = {}
        self._rows: DecodeRows | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def requests(self) -> list[Request]:
        """All requests, in the order they joined."""
        return list(self._requests.values())

    def add(self, request: Request) -> None:
        """Decode from the next step on, behind `request.computed` tokens; at least one is left to sample."""
        request.drafts_in_flight = 0
        request.covered = self._whole_blocks(request.computed)
        self._requests[request.request_id] = request
        self._rows = None

    def remove(self, request: Request) -> None:
        """Stop decoding."""
        del self._requests[request.request_id]
        self._rows = None

    def num_covered(self, request: Request) -> int:
        """Tokens for which its blocks have room."""
        return request.covered

    def next_positions(self, request: Request) -> tuple[int, int]:
        """Where its next step begins at the earliest, and the end of the positions that it may write."""
        start = request.computed - request.drafts_in_flight
        return start, min(request.computed + self.tokens_per_row, request.max_length)

    def needing_block(self) -> list[Request]:
        """Requests whose blocks do not cover the next step."""
        width = self.tokens_per_row
        return [
            request
            for request in self._requests.values()
            if request.covered < request.computed + width and request.covered < request.max_length
        ]

    def advance(self) -> tuple[DecodeRows, list[Request]]:
        """Schedule a step of every request; returns the rows, and the requests that are ending then."""
        if self._rows is None:
            self._rows = decode_rows(list(self._requests.values()))
        rows, width, num_drafts, ending = self._rows, self.tokens_per_row, self.num_drafts, []
        for request in rows.requests:
            computed = request.computed + width
            in_flight = request.drafts_in_flight + num_drafts
            request.computed, request.drafts_in_flight = computed, in_flight
            if computed > request.covered:
                request.covered = self._whole_blocks(min(computed, request.max_length))
            if computed - in_flight + 1 >= request.max_length:
                ending.append(request)
        for request in ending:
            self.remove(request)
        return rows, ending

    def correct(self, request: Request, num_tokens: int) -> None:
        """The result of a step has `num_tokens` of the request, which decodes or drains."""
        request.computed -= self.tokens_per_row - num_tokens
        request.drafts_in_flight -= self.num_drafts

    def is_ending(self, request: Request) -> bool:
        """Whether it gets all its tokens from the steps in flight, even if no draft is accepted."""
        return request.computed - request.drafts_in_flight + 1 >= request.max_length

    def check_integrity(self) -> None:
        """Raises AssertionError unless known, computed and covered tokens fit one another."""
        for request in self._requests.values():
            known, least = len(request.token_ids), request.computed - request.drafts_in_flight
            assert known - 1 <= least, "known tokens are not counted as computed"
            assert least + 1 < request.max_length, "a request is past its last step"
            assert request.drafts_in_flight % self.num_drafts == 0, "drafts were corrected in part"
            assert request.covered >= min(request.computed, request.max_length), "drafts have no blocks"

    def _whole_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) * self._block_size
