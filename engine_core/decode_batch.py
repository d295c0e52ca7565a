"""Requests in steady decode: each computes one token in every step.

A member costs nothing in a step where nothing happens to it. The cohort counts ticks, and a
member's computed tokens are `decode_offset + tick`. What will happen to whom is known ahead and
stands in two calendars: who needs a block, by tick modulo the block size, and who ends, by tick.
"""

from dataclasses import dataclass

from engine_core.request import Request


@dataclass(slots=True, frozen=True)
class DecodeRows:
    """The members of a step, as columns in batch order; reused until somebody joins or leaves."""

    requests: list[Request]
    rows: list[int]
    stop_ids: frozenset[int]
    """Every id that ends any of them."""


class DecodeBatch:
    """Who decodes now, and when each of them needs attention."""

    def __init__(self, block_size: int):
        self._step = 0
        self._requests: dict[int, Request] = {}
        self._needs_block: list[dict[int, Request]] = [{} for _ in range(block_size)]
        self._ends_at: dict[int, dict[int, Request]] = {}
        self._rows: DecodeRows | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def requests(self) -> list[Request]:
        """All members, in the order they joined."""
        return list(self._requests.values())

    def add(self, request: Request, steps: int) -> None:
        """Decode from the next tick on, for at most `steps` >= 1 ticks; `computed` says where it stands."""
        request.decode_offset = request.computed - self._step
        request.last_decode_step = self._step + steps - 1
        self._requests[request.request_id] = request
        self._block_slot(request)[request.request_id] = request
        self._ends_at.setdefault(request.last_decode_step, {})[request.request_id] = request
        self._rows = None

    def remove(self, request: Request) -> None:
        """Stop decoding; `computed` is valid again."""
        request.computed = self.computed(request)
        del self._requests[request.request_id]
        del self._block_slot(request)[request.request_id]
        ending = self._ends_at[request.last_decode_step]
        del ending[request.request_id]
        if not ending:
            del self._ends_at[request.last_decode_step]
        self._rows = None

    def computed(self, request: Request) -> int:
        """Tokens of a member that were handed out for computing."""
        return request.decode_offset + self._step

    def needing_block(self) -> list[Request]:
        """Members whose next token is the first of a block."""
        return list(self._needs_block[self._step % len(self._needs_block)].values())

    def advance(self) -> tuple[DecodeRows, list[Request]]:
        """Hand out one token of every member; returns them, and who thereby left for good."""
        if self._rows is None:
            self._rows = self._columns()
        decodes = self._rows
        ending = list(self._ends_at.get(self._step, {}).values())
        self._step += 1
        for request in ending:
            self.remove(request)
        return decodes, ending

    def check_integrity(self) -> None:
        """Raises AssertionError unless the calendars hold exactly the members."""
        assert sum(map(len, self._needs_block)) == len(self._requests), "block calendar and members differ"
        assert sum(map(len, self._ends_at.values())) == len(self._requests), "end calendar and members differ"
        for request_id, request in self._requests.items():
            assert self._block_slot(request).get(request_id) is request, "a member misses its block tick"
            assert self._ends_at[request.last_decode_step].get(request_id) is request, (
                "a member misses its end"
            )
            assert request.last_decode_step >= self._step, "a member has outlived its last tick"

    def _block_slot(self, request: Request) -> dict[int, Request]:
        return self._needs_block[-request.decode_offset % len(self._needs_block)]

    def _columns(self) -> DecodeRows:
        requests = list(self._requests.values())
        return DecodeRows(
            requests,
            [request.row for request in requests],
            frozenset().union(*{request.stop_ids for request in requests}),
        )
