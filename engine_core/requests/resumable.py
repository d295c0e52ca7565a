"""Streams that outlive their frontend: the ids of their sequences, until a client resumes them or time is up.

    running, its frontend lives       the frontend sends the tokens to its client
    running, its frontend is gone     an orphan: it goes on, and is ended after the grace
    all sequences have ended          kept for the grace: its client may not have got the last tokens

A stream is claimed by its key: the claiming frontend gets all ids, and the tokens from then on.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from atom.shared.messages.codec import encode
from atom.shared.messages.engine import ID_BYTES, AddRequest, Finished, FinishReason
from atom.shared.messages.resume import (
    Claim,
    Claimed,
    ClaimedRequest,
    ClaimedSequence,
    EndedSequence,
)
from engine_core.requests.request import Request

__all__ = ["NO_FRONTEND", "ResumableStreams"]

NO_FRONTEND = b""
"""The frontend of an orphan. No connection has this identity."""
_MAX_KEPT_BYTES = 256 * 1024 * 1024
"""Most bytes of all streams that are kept for the grace; the oldest ones are ended to make room."""
_ENTRY_BYTES = 2048
_OFFERED_AFTER_S = 3.0
"""A frontend that has only lost its connection sends its requests again sooner."""
_MAX_OFFERS = 32
"""In one iteration of the core's loop."""
_KEPT_REASONS = frozenset(FinishReason) - {
    FinishReason.ABORTED,
    FinishReason.ERROR,
    FinishReason.REFUSED,
    FinishReason.OVERLOADED,
}
"""Ends after which a client may still want the last tokens."""


@dataclass(slots=True)
class _Part:
    """One AddRequest of a stream."""

    message: AddRequest
    """With the ids of the prompt alone."""
    running: dict[int, Request]


@dataclass(slots=True)
class _Stream:
    tenant: str
    frontend: bytes
    parts: list[_Part] = field(default_factory=list)
    ended: dict[int, EndedSequence] = field(default_factory=dict)
    expires_at: float = 0.0

    @property
    def running(self) -> list[Request]:
        return [request for part in self.parts for request in part.running.values()]

    @property
    def size(self) -> int:
        """Bytes, about."""
        prompts = sum(
            len(part.message.prompt_ids) + len(_form(part.message)) + part.message.pixel_bytes
            for part in self.parts
        )
        outputs = sum(ID_BYTES * request.num_generated for request in self.running)
        return _ENTRY_BYTES + prompts + outputs + sum(len(each.output_ids) for each in self.ended.values())


class ResumableStreams:
    """The streams of one core that can be resumed. `grace_s` 0: none can."""

    def __init__(self, grace_s: float, clock: Callable[[], float]):
        self.num_expired = 0
        """Unfinished sequences whose time was up."""
        self._grace_s = grace_s
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._kept: OrderedDict[str, int] = (
            OrderedDict()
        )  # sizes of those with an end, the first to end first
        self._kept_bytes = 0
        self._orphans: dict[str, float] = {}  # when those without a frontend have lost it, by key

    @property
    def num_orphans(self) -> int:
        """Unfinished sequences without a frontend."""
        return sum(len(self._streams[key].running) for key in self._orphans)

    @property
    def num_orphaned(self) -> int:
        """Streams without a frontend."""
        return len(self._orphans)

    def replaced(self, message: AddRequest) -> list[int]:
        """Orphans to end, as their frontend, which has only lost its connection, sends them all again."""
        key = "" if message.resumable is None else message.resumable.key
        if key not in self._orphans or self._streams[key].tenant != message.tenant:
            return []
        found = [request.request_id for request in self._streams[key].running]
        self._forget(key)
        return found

    def add(self, message: AddRequest, requests: Iterable[Request], frontend: bytes) -> None:
        """Note the sequences of a new request if it is resumable. Raises ValueError for another's key."""
        if message.resumable is None or not self._grace_s:
            return
        key = message.resumable.key
        stream = self._streams.setdefault(key, _Stream(message.tenant, frontend))
        if stream.tenant != message.tenant or stream.frontend != frontend:
            raise ValueError("the key of its stream is in use")
        prompt = message.prompt_ids[: message.num_prompt_ids * ID_BYTES]
        resumable = msgspec.structs.replace(message.resumable, ended=[])
        own = msgspec.structs.replace(message, prompt_ids=prompt, prompt_length=0, resumable=resumable)
        stream.parts.append(_Part(own, {request.request_id: request for request in requests}))
        stream.ended |= {each.request_id: each for each in message.resumable.ended}
        self._unkeep(key)

    def ended(self, request: Request, end: Finished) -> list[int]:
        """Keep the ids of a sequence that has ended.

        If it has failed, so has its stream, which is forgotten; returns its other sequences, to be ended.
        """
        key = request.settings.resume_key
        if not key or (stream := self._streams.get(key)) is None:
            return []
        for part in stream.parts:
            part.running.pop(request.request_id, None)
        if end.reason not in _KEPT_REASONS:
            self._forget(key)
            return [each.request_id for each in stream.running]
        stream.ended[request.request_id] = EndedSequence(
            request.request_id,
            request.output_ids.tobytes(),
            int(end.reason),
            end.stop_token_id,
            request.cached_tokens or 0,
        )
        if not stream.running and key not in self._kept:
            self._keep(key, stream)
        return []

    def orphan(self, frontend: bytes) -> None:
        """Take the streams of a frontend that is gone from it."""
        for key, stream in list(self._streams.items()):
            if stream.frontend == frontend:
                self._give(stream, NO_FRONTEND)
                self._orphans[key] = self._clock()
                if key not in self._kept:
                    self._keep(key, stream)

    def offers(self, frontend: bytes) -> list[Claimed]:
        """Orphans that `frontend` keeps from now on, for the rest of their time: it outlives this engine."""
        now = self._clock()
        found = []
        for key, since in list(itertools.islice(self._orphans.items(), _MAX_OFFERS)):
            if now < since + _OFFERED_AFTER_S:
                break
            stream = self._streams[key]
            left_s = max(stream.expires_at - now, 0.0)
            found.append(msgspec.structs.replace(self._claimed(0, key, stream), left_s=left_s))
            self._give(stream, frontend)
            del self._orphans[key]
            self._unkeep(key)
            if not stream.running:
                self._keep(key, stream)
        return found

    def claim(self, message: Claim, frontend: bytes) -> tuple[Claimed, bytes, list[int]]:
        """(the response, the frontend that had the stream, its unfinished sequences).

        That frontend is NO_FRONTEND for an orphan, and for a stream that has none of its own to lose.
        """
        stream = self._streams.get(message.key)
        if stream is None or stream.tenant != message.tenant:
            return Claimed(message.number, message.key), NO_FRONTEND, []
        earlier = stream.frontend
        claimed = self._claimed(message.number, message.key, stream)
        self._give(stream, frontend)
        self._orphans.pop(message.key, None)
        self._unkeep(message.key)
        if not stream.running:
            self._keep(message.key, stream)
        lost = [] if earlier == frontend else [request.request_id for request in stream.running]
        return claimed, earlier if lost else NO_FRONTEND, lost

    def take(self, most: int) -> tuple[list[Claimed], list[int]]:
        """Forget up to `most` streams, which another server gets: (what it gets, unfinished sequences)."""
        now = self._clock()
        found = []
        running: list[int] = []
        for key, stream in list(itertools.islice(self._streams.items(), most)):
            left_s = max(stream.expires_at - now, 0.0) if key in self._kept else self._grace_s
            found.append(msgspec.structs.replace(self._claimed(0, key, stream), left_s=left_s))
            running += [request.request_id for request in stream.running]
            self._forget(key)
        return found, running

    def __len__(self) -> int:
        return len(self._streams)

    def expired(self) -> list[int]:
        """Forget the streams whose time is up, or that have no room; their unfinished sequences."""
        found: list[int] = []
        now = self._clock()
        while self._kept:
            key = next(iter(self._kept))
            stream = self._streams[key]
            if stream.expires_at > now and self._kept_bytes <= _MAX_KEPT_BYTES:
                break
            found += [request.request_id for request in stream.running]
            self._forget(key)
        self.num_expired += len(found)
        return found

    def is_owner(self, request: Request, frontend: bytes) -> bool:
        """Whether `frontend` may end a sequence: another one may have claimed it."""
        return not request.settings.resume_key or request.frontend == frontend

    def _claimed(self, number: int, key: str, stream: _Stream) -> Claimed:
        requests = [
            ClaimedRequest(encode(part.message), [_snapshot(each) for each in part.running.values()])
            for part in stream.parts
        ]
        return Claimed(number, key, requests, list(stream.ended.values()))

    def _give(self, stream: _Stream, frontend: bytes) -> None:
        stream.frontend = frontend
        for request in stream.running:
            request.frontend = request.settings.frontend = frontend

    def _keep(self, key: str, stream: _Stream) -> None:
        stream.expires_at = self._clock() + self._grace_s
        self._kept[key] = size = stream.size
        self._kept_bytes += size

    def _unkeep(self, key: str) -> None:
        self._kept_bytes -= self._kept.pop(key, 0)

    def _forget(self, key: str) -> None:
        self._unkeep(key)
        self._orphans.pop(key, None)
        del self._streams[key]


def _form(message: AddRequest) -> bytes:
    return b"" if message.resumable is None else message.resumable.form


def _snapshot(request: Request) -> ClaimedSequence:
    return ClaimedSequence(request.request_id, request.output_ids.tobytes(), request.cached_tokens or 0)
