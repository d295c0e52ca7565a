"""Streams of an earlier server, until a client resumes them here; and how a core gives its streams away."""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from atom.shared.messages.admin import Done
from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.engine import AddRequest, FromCore
from atom.shared.messages.resume import Claimed, GetStream, HandedStream, TakeStreams
from atom.shared.utils.endpoint import connect
from atom.shared.utils.logger import get_logger

__all__ = ["HandedStreams", "take_streams"]

_MAX_BYTES = 256 * 1024 * 1024
"""Most bytes of all streams; the oldest ones are dropped to make room."""
_ENTRY_BYTES = 2048
_ANSWER_DEADLINE_S = 10.0
_request: Decoder[AddRequest] = Decoder(AddRequest)


@dataclass(slots=True)
class _Entry:
    tenant: str
    expires_at: float
    parts: list[Claimed] = field(default_factory=list)
    size: int = _ENTRY_BYTES


class HandedStreams:
    """By key: what the engines of an earlier server had of each stream."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.is_pending = False
        """Whether an earlier server may still hand streams over."""
        self.difference = ""
        """How the model of the earlier server differs; its streams cannot go on then, and say so."""
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._ends: list[tuple[float, str]] = []  # a heap: when each entry expires, also of dropped ones
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, claimed: Claimed) -> None:
        """Keep what one engine had of a stream, for the seconds that it has left. Raises WireError."""
        tenant = _request.decode(claimed.requests[0].request).tenant if claimed.requests else ""
        expires_at = self._clock() + claimed.left_s
        entry = self._entries.get(claimed.key)
        if entry is None:
            entry = self._entries[claimed.key] = _Entry(tenant, expires_at)
            self._bytes += entry.size
            heapq.heappush(self._ends, (expires_at, claimed.key))
        if not self.difference:  # else the key is enough to say why it cannot go on
            size = _size(claimed)
            entry.parts.append(claimed)
            entry.size += size
            self._bytes += size
        while self._bytes > _MAX_BYTES and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def take(self, question: GetStream) -> HandedStream:
        """The response to a frontend: the stream, which is its own from now on."""
        self.expire()
        entry = self._entries.get(question.key)
        if entry is None or entry.tenant != question.tenant:
            return HandedStream(question.number, is_pending=self.is_pending)
        if self.is_pending and not self.difference:  # another engine may have a part of it
            return HandedStream(question.number, is_pending=True)
        if self.difference:
            return HandedStream(question.number, refusal=self.difference)
        self._drop(question.key)
        return HandedStream(question.number, entry.parts)

    def take_all(self) -> Iterator[Claimed]:
        """Every stream with the time that it has left, for the next server."""
        self.expire()
        now = self._clock()
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            self._drop(key)
            for part in entry.parts:
                yield Claimed(0, part.key, part.requests, part.ended, entry.expires_at - now)

    def expire(self) -> None:
        """Drop the streams whose time is up. To be called now and then: clients may never ask."""
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            at, key = heapq.heappop(self._ends)
            if (entry := self._entries.get(key)) is not None and entry.expires_at == at:
                self._drop(key)

    def _drop(self, key: str) -> None:
        self._bytes -= self._entries.pop(key).size


def _size(claimed: Claimed) -> int:
    running = sum(len(each.output_ids) for part in claimed.requests for each in part.sequences)
    ended = sum(len(each.output_ids) for each in claimed.ended)
    return running + ended + sum(len(part.request) for part in claimed.requests)


def take_streams(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> Iterator[Claimed]:
    """All streams of the core at `endpoint`, which forgets them; fewer, with a log line, if it is silent."""
    decoder = Decoder[FromCore](FromCore)
    number = 0
    with context.socket(zmq.DEALER) as core:
        core.setsockopt(zmq.LINGER, 0)
        connect(core, endpoint)
        left = 1
        while left:
            number += 1
            core.send(encode(TakeStreams(number)), zmq.DONTWAIT)
            while True:
                if not core.poll(int(_ANSWER_DEADLINE_S * 1000)):
                    get_logger().error("an engine core does not hand its streams over: they end")
                    return
                message = decoder.decode(core.recv())
                if isinstance(message, Claimed):
                    yield message
                elif isinstance(message, Done):
                    left = message.count
                    break
