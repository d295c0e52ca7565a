"""The decode batch: requests that each compute one token in every step.

A request costs nothing in a step where it neither needs a block nor reaches its length limit. The
batch counts its steps, and a request's computed tokens are `decode_offset` + steps. Two schedules by
step, known in advance, hold the requests that need a block (by step modulo the block size) and the
requests that end.
"""

from dataclasses import dataclass

from engine_core.requests.request import Request

MAX_STOP_IDS = 4096
"""Above this, a set of all stop ids costs more than looking at each request."""


@dataclass(slots=True, frozen=True)
class DecodeRows:
    """The requests of a step as columns, in batch order; reused until a request joins or leaves."""

    requests: list[Request]
    rows: list[int]
    stop_ids: frozenset[int] | None
    """All ids that end one of the requests; None where they are more than `MAX_STOP_IDS`."""


class DecodeBatch:
    """The running requests that decode, and the steps in which they need a block or end."""

    tokens_per_row = 1
    num_drafts = 0

    def __init__(self, block_size: int):
        self._step = 0
        self._requests: dict[int, Request] = {}
        self._needs_block: list[dict[int, Request]] = [{} for _ in range(block_size)]
        self._ends_at: dict[int, dict[int, Request]] = {}
        self._rows: DecodeRows | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def requests(self) -> list[Request]:
        """All requests, in the order they joined."""
        return list(self._requests.values())

    def add(self, request: Request) -> None:
        """Decode from the next step on.

        `request.num_computed_tokens` are done or in flight, and at least one is left to sample.
        """
        request.decode_offset = request.num_computed_tokens - self._step
        # The last step computes position `max_length - 2` and samples the last token.
        request.last_decode_step = self._step + request.max_length - request.num_computed_tokens - 2
        self._requests[request.request_id] = request
        self._block_slot(request)[request.request_id] = request
        self._ends_at.setdefault(request.last_decode_step, {})[request.request_id] = request
        self._rows = None

    def remove(self, request: Request) -> None:
        """Stop decoding, and set `request.num_computed_tokens`, which is not kept up to date here."""
        request.num_computed_tokens = self.num_computed_tokens(request)
        del self._requests[request.request_id]
        del self._block_slot(request)[request.request_id]
        ending = self._ends_at[request.last_decode_step]
        del ending[request.request_id]
        if not ending:
            del self._ends_at[request.last_decode_step]
        self._rows = None

    def num_computed_tokens(self, request: Request) -> int:
        """Tokens of a request of the batch that are computed or in flight."""
        return request.decode_offset + self._step

    def num_covered(self, request: Request) -> int:
        """Tokens for which its blocks have room."""
        return self.num_computed_tokens(request)

    def needing_block(self) -> list[tuple[Request, int, int]]:
        """Requests whose next token is the first of a block, with its position and the one after it."""
        step = self._step
        return [
            (request, request.decode_offset + step, request.decode_offset + step + 1)
            for request in self._needs_block[step % len(self._needs_block)].values()
        ]

    def advance(self) -> tuple[DecodeRows, list[Request]]:
        """Schedule one token of every request; returns the rows, and the requests whose last step it is."""
        if self._rows is None:
            self._rows = decode_rows(list(self._requests.values()))
        rows = self._rows
        ending = list(self._ends_at.get(self._step, {}).values())
        self._step += 1
        for request in ending:
            self.remove(request)
        return rows, ending

    def check_integrity(self) -> None:
        """Raises AssertionError unless both schedules hold exactly the requests of the batch."""
        assert sum(map(len, self._needs_block)) == len(self._requests), "block schedule and batch differ"
        assert sum(map(len, self._ends_at.values())) == len(self._requests), "end schedule and batch differ"
        for request_id, request in self._requests.items():
            assert self._block_slot(request).get(request_id) is request, "a block step is missing"
            assert self._ends_at[request.last_decode_step].get(request_id) is request, (
                "a last step is missing"
            )
            assert request.last_decode_step >= self._step, "a request is past its last step"

    def _block_slot(self, request: Request) -> dict[int, Request]:
        return self._needs_block[-request.decode_offset % len(self._needs_block)]


def decode_rows(requests: list[Request]) -> DecodeRows:
    """The columns of these requests."""
    return DecodeRows(requests, [request.row for request in requests], union_of_stop_ids(requests))


def union_of_stop_ids(
    requests: list[Request], others: frozenset[int] | None = frozenset()
) -> frozenset[int] | None:
    """The stop ids of these requests and `others`; None where they are more than `MAX_STOP_IDS`."""
    sets = {request.stop_ids for request in requests}
    if others is None or len(others) + sum(map(len, sets)) > MAX_STOP_IDS:
        return None
    return others.union(*sets)
