"""Streams that a client resumes: claimed from the engines, or kept here since the client disconnected.

    a client disconnects        the stream is kept, with its sequences, for the grace
    a frontend dies             the engines offer its streams to another one, which keeps them so
    a client asks for a stream  that is kept here, or claimed from all engines: each one sends what it has
    the server is replaced      the engines give their streams to the supervisor, and each frontend what waits
                                for an engine; the new one has them, and gives each to the frontend that
                                its client asks: it is sent to engines there
    its engine died as well     what the frontend has written of the stream is sent to an engine (StreamFiles)

An engine that has just started may not have the sequences again yet: the claim is repeated then.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.engine import AddRequest
from atom.shared.messages.resume import (
    RESUMED_ELSEWHERE,
    Claim,
    Claimed,
    ClaimedRequest,
    ClaimedSequence,
    HandedStream,
    Resumable,
)
from frontend.engine_client.client_settings import ClientSettings
from frontend.engine_client.engine_connection import EngineConnection
from frontend.engine_client.engine_set import EngineSet
from frontend.engine_client.sequence import RunningSequence, claimed_requests
from frontend.engine_client.stream_files import MOST_BYTES, StreamFiles, StreamHeldError
from frontend.engine_client.streams import Stream
from frontend.errors import EngineError, RequestError, ResumedElsewhereError, UnavailableError
from frontend.metrics.metrics import Metrics
from frontend.text.output_processor import SequenceOutput, ended_update

__all__ = ["Adoption", "ResumedStream", "Resumption", "ResumptionHooks"]

_ANSWER_DEADLINE_S = 5.0
_RETRY_S = 0.2
# So long after the end of an engine its sequences may be on their way to another one.
_SETTLED_S = 5.0
_HELD_S = 5.0
"""How long a stream is waited for that another connection or frontend has, and no engine."""
_request: Decoder[AddRequest] = Decoder(AddRequest)


@dataclass(slots=True, eq=False)
class ResumedStream:
    """A stream that another connection, or another frontend, has begun."""

    key: str
    tenant: str
    stream: Stream
    resumable: Resumable | None = None
    """None while nothing of it is found."""
    known: set[int] = field(default_factory=set)
    """Ids of the sequences that were found."""
    handed: list[Claimed] = field(default_factory=list)
    """What an earlier server, or a dead frontend, had of it, until `Resumption.begin`."""

    @property
    def is_whole(self) -> bool:
        """Whether all its sequences are known."""
        return bool(self.handed) or (
            self.resumable is not None and self.known.issuperset(self.resumable.request_ids)
        )


@dataclass(frozen=True, slots=True)
class Adoption:
    """A sequence that an engine runs already, or has run, and that goes on in `stream`."""

    engine: EngineConnection | None
    """None: it waits for one."""
    request: AddRequest
    sequence: ClaimedSequence
    stream: Stream


@dataclass(slots=True, eq=False)
class _OpenClaim:
    """A claim, until all engines have answered."""

    resumed: ResumedStream
    engines: set[EngineConnection]
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def answered(self, engine: EngineConnection) -> None:
        self.engines.discard(engine)
        if not self.engines:
            self.done.set()


@dataclass(frozen=True, slots=True)
class ResumptionHooks:
    """What the owner of the sequences does."""

    new_stream: Callable[[], Stream]
    adopt: Callable[[Adoption], None]
    unfinished: Callable[[Stream], list[RunningSequence]]
    """The unfinished sequences of a stream."""
    end: Callable[[Stream], None]
    """Ends a stream's sequences."""
    handed: Callable[[str, str], Awaitable[HandedStream]]
    """As ClientHooks.handed_stream."""


class Resumption:
    """The streams of this frontend that wait for a client, and the claims that wait for engines."""

    def __init__(
        self, engines: EngineSet, settings: ClientSettings, metrics: Metrics, hooks: ResumptionHooks
    ):
        self.grace_s = settings.orphan_grace
        has_files = settings.stream_dir and self.grace_s
        self._files = StreamFiles(Path(settings.stream_dir) if has_files else None)
        self._metrics = metrics
        self._engines = engines
        self._hooks = hooks
        self._numbers = count(1)
        self._claims: dict[int, _OpenClaim] = {}
        self._kept: dict[str, tuple[ResumedStream, asyncio.TimerHandle]] = {}
        self._lost_at = 0.0
        self.is_leaving = False
        """Whether another server replaces this one: streams are left to the engines, which hand them over."""

    def __len__(self) -> int:
        """Streams that wait for a client."""
        return len(self._kept)

    def open(self) -> None:
        """In the running event loop. What dead frontends have left is removed after the grace."""
        left = self._files.left()
        asyncio.get_running_loop().call_later(self.grace_s, self._files.remove, left)

    def begun(self, requests: list[AddRequest], stream: Stream) -> ResumedStream | None:
        """A new stream; None if it cannot be resumed."""
        resumable = requests[0].resumable
        if resumable is None:
            return None
        if sum(each.pixel_bytes for each in requests) <= MOST_BYTES:  # else not even encoded
            parts = [
                ClaimedRequest(encode(each), [ClaimedSequence(number, b"") for number in each.request_ids])
                for each in requests
            ]
            stream.file = self._files.begin(Claimed(0, resumable.key, parts))
        return ResumedStream(resumable.key, requests[0].tenant, stream, resumable, set(resumable.request_ids))

    def keep(self, resumed: ResumedStream, left_s: float | None = None) -> None:
        """Keep a stream whose client is gone; after the grace its sequences are ended."""
        self.begin(resumed)
        self._discard(resumed.key)
        delay_s = self.grace_s if left_s is None else left_s
        timer = asyncio.get_running_loop().call_later(delay_s, self._expire, resumed.key)
        self._kept[resumed.key] = resumed, timer

    def close(self) -> None:
        """End all streams that are kept, unless another server goes on with them."""
        if self.is_leaving:
            for _, timer in self._kept.values():
                timer.cancel()
            self._kept.clear()
        for key in list(self._kept):
            self._discard(key)

    def without_engine(self) -> list[Claimed]:
        """What waits for an engine of the streams that are kept: no engine can hand it over."""
        now = asyncio.get_running_loop().time()
        found = []
        for key, (resumed, timer) in self._kept.items():
            unfinished = self._hooks.unfinished(resumed.stream)
            waiting = [each for each in unfinished if each.engine is None or not each.engine.link.is_ready]
            if waiting:
                requests = claimed_requests(waiting)
                ended = list(resumed.stream.sequences_ended)
                found.append(Claimed(0, key, requests, ended, max(timer.when() - now, 0.0)))
        return found

    async def resume(self, key: str, tenant: str) -> ResumedStream:
        """The stream `key`; its reader gets all tokens again, from the first one on, after `begin`.

        Raises RequestError (404) if it is unknown, a part of it is lost, or it belongs to another model;
        UnavailableError if it waits for an engine where an earlier connection still has it.
        """
        deadline = time.monotonic() + _HELD_S
        while True:
            resumed = self._pop_kept(key, tenant) or ResumedStream(key, tenant, self._hooks.new_stream())
            try:
                await self._complete(resumed)
                break
            except BaseException as error:
                if resumed.known or resumed.handed:
                    self.keep(resumed)
                if not isinstance(error, StreamHeldError):
                    raise
            if time.monotonic() > deadline:
                raise _held(key)
            await asyncio.sleep(_RETRY_S)
        self._metrics.resumed += 1
        if not resumed.handed:
            self._restart(resumed)
            if resumed.stream.file is None:
                self._write(resumed)
        return resumed

    def begin(self, resumed: ResumedStream) -> None:
        """Send to engines what an earlier server had of a stream, if that was not done yet.

        Its grammar must be compiled: the engines do not have it.
        """
        if not resumed.handed:
            return
        handed = resumed.handed
        resumed.handed = []
        for claimed in handed:
            self._add(None, claimed, resumed)
        self._restart(resumed)
        self._write(resumed)

    def _write(self, resumed: ResumedStream) -> None:
        """Give a stream a file with all that it has now; one that has ended is left where it was found."""
        stream = resumed.stream
        earlier = stream.file
        if parts := claimed_requests(self._hooks.unfinished(stream)):
            stream.file = self._files.begin(Claimed(0, resumed.key, parts, list(stream.sequences_ended)))
            if earlier is not None:
                earlier.remove()
        elif earlier is not None:  # its client may ask once more
            left = earlier.leave()
            stream.file = None
            asyncio.get_running_loop().call_later(self.grace_s, self._files.remove, [left])

    def _restart(self, resumed: ResumedStream) -> None:
        ended = [ended_update(end) for end in resumed.stream.sequences_ended]
        running = [sequence.output() for sequence in self._hooks.unfinished(resumed.stream)]
        resumed.stream.restart([*running, *ended])

    def answered(self, engine: EngineConnection, claimed: Claimed) -> None:
        """Go on here with the sequences of a stream that an engine has sent, also without a client."""
        claim = self._claims.get(claimed.number)
        if claim is not None:
            self._add(engine, claimed, claim.resumed)
            claim.answered(engine)
            return
        entry = self._kept.get(claimed.key)
        resumed = ResumedStream(claimed.key, "", self._hooks.new_stream()) if entry is None else entry[0]
        self._add(engine, claimed, resumed)
        if resumed.known:
            left_s = claimed.left_s or None
            self._kept.pop(claimed.key, None)
            if entry is not None:
                entry[1].cancel()
            self.keep(resumed, left_s)
            if resumed.is_whole and resumed.stream.file is None:
                self._write(resumed)

    def ended(self, sequence: RunningSequence, update: SequenceOutput) -> None:
        """Note the end of a sequence of a resumable stream, or that another frontend has claimed the stream.

        If it has failed, so has its stream.
        """
        resumable = sequence.state.request.resumable
        assert resumable is not None
        stream = sequence.stream
        if not update.error:
            stream.sequences_ended.append(sequence.ended(update))
            return
        # `restart` may still come, for a client of this frontend that has just asked for the stream.
        if update.error == RESUMED_ELSEWHERE:
            if stream.file is not None:
                stream.file.leave()  # the other frontend has put its own in that place, or will
            stream.end(ResumedElsewhereError())
        elif update.is_refused:
            stream.end(RequestError(update.error))
        else:
            stream.fail(EngineError(update.error, code="engine_error"))
        entry = self._kept.get(resumable.key)
        if entry is not None and entry[0].stream is stream:
            self._discard(resumable.key)

    def lost(self, engine: EngineConnection) -> None:
        """Stop waiting for the answers of an engine that has ended."""
        self._lost_at = time.monotonic()
        for claim in self._claims.values():
            claim.answered(engine)

    async def _complete(self, resumed: ResumedStream) -> None:
        """Claim a stream until all its sequences are known. Raises RequestError, StreamHeldError."""
        deadline = time.monotonic() + self.grace_s
        while not resumed.is_whole:
            have_answered = await self._claim(resumed)
            if resumed.is_whole:
                return
            handed = await self._hooks.handed(resumed.key, resumed.tenant)
            if handed.refusal:
                raise _other_model(resumed.key, handed.refusal)
            if handed.claimed:
                _set_handed(resumed, handed.claimed)
                return
            now = time.monotonic()
            # An engine that has not answered may have the stream.
            is_settled = have_answered and all(self._engines.up.values()) and now > self._lost_at + _SETTLED_S
            if not handed.is_pending and (is_settled or now > deadline):
                left = await self._files.take(resumed.key, resumed.tenant) if have_answered else None
                if left is None:
                    raise _unknown(resumed.key, bool(resumed.known))
                claimed, resumed.stream.file = left
                _set_handed(resumed, [claimed])
                return
            await asyncio.sleep(_RETRY_S)

    async def _claim(self, resumed: ResumedStream) -> bool:
        """Ask all ready engines for what they have of a stream; returns whether all have answered."""
        ready = {engine for engine in self._engines if engine.link.is_ready}
        if not ready:
            return True
        number = next(self._numbers)
        claim = self._claims[number] = _OpenClaim(resumed, ready)
        for engine in list(ready):
            engine.link.send(Claim(number, resumed.key, resumed.tenant))
        try:
            with contextlib.suppress(TimeoutError):  # some have answered: the caller sees what is missing
                async with asyncio.timeout(_ANSWER_DEADLINE_S):
                    await claim.done.wait()
        finally:
            del self._claims[number]
        return claim.done.is_set()

    def _pop_kept(self, key: str, tenant: str) -> ResumedStream | None:
        """The stream `key`, if it is kept here; from now on it is not."""
        entry = self._kept.get(key)
        if entry is None or entry[0].tenant != tenant:
            return None
        del self._kept[key]
        entry[1].cancel()
        if entry[0].stream.failed:
            self._hooks.end(entry[0].stream)
            return None
        return entry[0]

    def _expire(self, key: str) -> None:
        self._metrics.expired += 1
        self._discard(key)

    def _discard(self, key: str) -> None:
        if (entry := self._kept.pop(key, None)) is not None:
            entry[1].cancel()
            self._hooks.end(entry[0].stream)

    def _add(self, engine: EngineConnection | None, claimed: Claimed, resumed: ResumedStream) -> None:
        for part in claimed.requests:
            request = _request.decode(part.request)
            resumed.resumable = request.resumable
            resumed.tenant = request.tenant
            for each in part.sequences:
                if each.request_id not in resumed.known:
                    resumed.known.add(each.request_id)
                    self._hooks.adopt(Adoption(engine, request, each, resumed.stream))
        for end in claimed.ended:
            if end.request_id not in resumed.known:
                resumed.known.add(end.request_id)
                resumed.stream.sequences_ended.append(end)


def _set_handed(resumed: ResumedStream, handed: list[Claimed]) -> None:
    """Note what an earlier server, or a dead frontend, had of a stream; nothing runs before `begin`."""
    resumed.resumable = _request.decode(handed[0].requests[0].request).resumable
    resumed.handed = handed


def _other_model(key: str, difference: str) -> RequestError:
    return RequestError(
        f"the stream was begun before an upgrade to another model, which cannot go on with it "
        f"({difference}): send the request again; its id is {key!r:.80}",
        status=404,
        code="stream_of_other_model",
    )


def _held(key: str) -> UnavailableError:
    return UnavailableError(
        f"an earlier connection has not ended yet, and its stream waits for an engine: ask again; its id is "
        f"{key!r:.80}",
        code="stream_busy",
    )


def _unknown(key: str, is_partial: bool) -> RequestError:
    what = "a part of the stream is lost with its engine" if is_partial else "the stream is unknown"
    return RequestError(
        f"{what}: it was not begun with 'X-Resumable-Stream: true' and this API key, or has ended, or its "
        f"time is up (--orphan-grace): send the request again; its id is {key!r:.80}",
        status=404,
        code="stream_not_found",
    )
