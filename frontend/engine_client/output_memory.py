"""The memory of output that was generated and is not sent yet.

Output waits for the rest of its response, or for a client that does not read. Its size is counted as that
of its JSON, an estimate: until it is formatted it takes about a tenth of that with log probabilities; while
a response is encoded, up to twice.

A stream whose client reads holds nothing: an update that finds no other one pending is not counted.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from frontend.errors import ApiError, OverloadedError, RequestError

__all__ = ["HeldOutput", "OutputMemory", "default_output_memory"]

_RETRY_AFTER_S = 5
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
# The frontends of a host may hold this part of its memory: one in so many bytes.
_FRACTION = 8


def default_output_memory(num_frontends: int) -> int:
    """Bytes for each of the frontends: together an eighth of the memory that this host or container has."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else ""
    if limit.isdigit():
        total = min(total, int(limit))
    return total // (_FRACTION * num_frontends)


class OutputMemory:
    """Bounds the bytes of output that are held for all requests of this process, and for each.

    `used` may exceed `limit` by what one step generates: `enforce` is called after each one.
    """

    def __init__(self, limit: int):
        self.used = 0
        self.limit = limit
        self.response_limit = limit // 2
        """Most bytes of a response that is sent in one piece."""
        self.stream_limit = limit // 8
        """Most bytes of updates that wait for a client which does not read its stream."""
        self._held: set[HeldOutput] = set()
        self._exceeded: list[HeldOutput] = []

    @property
    def is_exceeded(self) -> bool:
        """Whether `enforce` has something to do."""
        return self.used > self.limit or bool(self._exceeded)

    def enforce(self) -> None:
        """End the requests above their own limit, and those that hold most while the total is exceeded."""
        exceeded = self._exceeded
        self._exceeded = []
        for held in exceeded:
            if held.pending > held.limit:
                held.end(self._own_error(held))
        while self.used > self.limit:
            most = max(self._held, key=lambda held: held.pending, default=None)
            if most is None or not most.pending:
                return  # all of it is being sent, which has a deadline
            most.end(
                OverloadedError(
                    f"{self.limit} bytes of output wait to be sent, and this request holds most of them: "
                    "try again later, read faster, or request fewer choices, tokens or log probabilities",
                    _RETRY_AFTER_S,
                )
            )

    @contextlib.contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        """Count output that is known before it is generated. Raises OverloadedError if there is no room."""
        if self.used + size > self.limit and size:
            raise OverloadedError(
                f"{self.used} of {self.limit} bytes of output wait to be sent, and this response shows "
                f"prompts in {size} more: try again later",
                _RETRY_AFTER_S,
            )
        with self.sending(size):
            yield

    @contextlib.contextmanager
    def sending(self, size: int) -> Iterator[None]:
        """Count a response, or a part of one, until it is sent."""
        self.used += size
        try:
            yield
        finally:
            self.used -= size

    def _own_error(self, held: "HeldOutput") -> ApiError:
        if held.limit == self.response_limit:
            return RequestError(
                f"the response has more than {held.limit} bytes, the most that this server sends in one "
                "piece: use 'stream': true, or request fewer choices, tokens or log probabilities",
                code="response_too_large",
            )
        return RequestError(
            f"more than {held.limit} bytes of this stream waited for its client to read them: "
            "read faster, or request fewer choices or log probabilities",
            code="client_too_slow",
        )


class HeldOutput:
    """The output of one request that is not sent yet, in bytes."""

    __slots__ = ("_end", "_memory", "limit", "pending", "taken")

    def __init__(self, memory: OutputMemory, limit: int, end: Callable[[ApiError], None]):
        """`end` is called with the reason when this request must end; it drops the pending output."""
        self.limit = limit
        self.pending = 0
        """Bytes that the reader has not taken yet."""
        self.taken = 0
        """Bytes that are being sent or encoded."""
        self._memory = memory
        self._end = end

    def hold(self, size: int) -> None:
        """More output is pending: `size` bytes."""
        memory = self._memory
        if not self.pending:
            memory._held.add(self)
        memory.used += size
        if self.pending <= self.limit < self.pending + size:
            memory._exceeded.append(self)
        self.pending += size

    def take(self) -> None:
        """Count all that is pending as taken by the reader, which sends it now."""
        self.taken = self.taken + self.pending
        self.pending = 0
        self._memory._held.discard(self)

    def sent(self) -> None:
        """All that was taken has been sent."""
        self._memory.used -= self.taken
        self.taken = 0

    def drop(self) -> None:
        """Drop what is pending: it will not be sent."""
        self._memory.used -= self.pending
        self.pending = 0
        self._memory._held.discard(self)

    def close(self) -> None:
        """Release the memory of all that is held."""
        self.drop()
        self.sent()

    def end(self, error: ApiError) -> None:
        """End the request."""
        self._end(error)
        self.drop()
