"""Streams that can be resumed: their form, the ids of their events, and how a part is rendered again.

The events of such a stream depend on the ids of its tokens alone: each token is rendered by itself, also
where several have arrived at once, and made-up ids of tool calls come from the key of the stream. So any
frontend renders the same events from the ids again, and leaves out those that the client has.

    id: KEY/57          one sequence: the event is the 57th
    id: KEY/12.9.0      two: the 12th and the 9th of the sequences, and none after their ends
"""

import hashlib
import re
import secrets
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from atom.shared.messages.engine import ID_BYTES, AddRequest, Finished, FinishReason, TokenDeltas
from atom.shared.messages.resume import MAX_RESUMABLE_BYTES, MAX_RESUMABLE_SEQUENCES, Resumable
from frontend.api.generation.endpoint import ParsedRequest
from frontend.api.generation.generate_request import GenerateRequest
from frontend.api.generation.renderer import Renderer
from frontend.api.generation.update_events import update_events
from frontend.engine_client.streams import Stream
from frontend.errors import RequestError
from frontend.text.output_processor import OutputProcessor, RequestState, SequenceOutput, end_of
from frontend.text.reply_formats.base import call_ids

__all__ = [
    "RESUMABLE",
    "Position",
    "ResumableEvents",
    "ResumeForm",
    "check_resumable",
    "read_form",
    "resumable_requests",
    "stream_key",
]

RESUMABLE = "X-Resumable-Stream"
"""The header that asks for it."""
_RESPONSE = "resp_"
_PIECE = 256
"""Tokens that are rendered between two writes, at most."""
_MAX_DIGITS = 9
_COUNTS = re.compile(rf"\d{{1,{_MAX_DIGITS}}}(\.\d{{1,{_MAX_DIGITS}}})*", re.ASCII)
_AFTER_TOKENS = frozenset(
    {FinishReason.ABORTED, FinishReason.ERROR, FinishReason.REFUSED, FinishReason.TIMEOUT}
)
"""Ends that are no event of the last token, but one of their own."""


class ResumeForm(msgspec.Struct, array_like=True, frozen=True):
    """How a stream is rendered: the request as it came, and what its first frontend chose."""

    endpoint: str
    """The `id_prefix` of its endpoint."""
    body: bytes
    name: str
    """The request's id without that prefix."""
    created: int
    started: float
    """Arrival, on the monotonic clock, which all processes of a host share."""
    timeout_s: float | None
    """As in GenerateRequest."""
    grids: list[tuple[int, int]]
    """Rows and columns of the tokens of each image, whose file may be gone when the stream is resumed."""

    def encoded(self) -> bytes:
        """As in Resumable."""
        return msgspec.msgpack.encode(self)


def read_form(encoded: bytes) -> ResumeForm:
    """The inverse of `ResumeForm.encoded`."""
    return msgspec.msgpack.decode(encoded, type=ResumeForm)


def stream_key(name: str, given: str | None) -> str:
    """The id of the stream of the request `name`: nobody can guess it.

    A response of /v1/responses, which clients ask for by its own id, has that, unless the client chose it.
    """
    return name if given is None and name.startswith(_RESPONSE) else secrets.token_hex(16)


def check_resumable(parsed: ParsedRequest, grace_s: float) -> None:
    """Raises RequestError for a request whose stream cannot be resumed."""
    problem = ""
    if not grace_s:
        problem = "needs a server with --orphan-grace above 0"
    elif not parsed.fields.stream:
        problem = "needs 'stream': true"
    elif parsed.logprobs is not None or parsed.score_only:
        problem = "cannot be combined with log probabilities"
    elif parsed.earlier_bytes:
        problem = "cannot be combined with stored responses: send the whole conversation as 'input'"
    if problem:
        raise RequestError(f"'{RESUMABLE}: true' {problem}", param=RESUMABLE, code="unsupported_parameter")


def resumable_requests(requests: Sequence[AddRequest], key: str, form: bytes) -> list[AddRequest]:
    """`requests`, with what another frontend needs. Raises RequestError for too many or too large ones."""
    ids = [number for request in requests for number in request.request_ids]
    if len(ids) > MAX_RESUMABLE_SEQUENCES:
        raise RequestError(
            f"'{RESUMABLE}: true' takes at most {MAX_RESUMABLE_SEQUENCES} sequences in a request, "
            f"not {len(ids)}",
            param=RESUMABLE,
        )
    size = sum(
        len(request.request_ids) * (len(form) + len(request.prompt_ids) + ID_BYTES * request.max_tokens)
        + request.pixel_bytes
        for request in requests
    )
    if size > MAX_RESUMABLE_BYTES:
        raise RequestError(
            f"the request may have {size} bytes of ids, text and images with its output, and a stream that "
            f"can be resumed {MAX_RESUMABLE_BYTES} at most: send a shorter prompt, fewer sequences, or a "
            "smaller 'max_tokens'",
            param=RESUMABLE,
        )
    resumable = Resumable(key, form, ids[0], len(ids))
    return [msgspec.structs.replace(request, resumable=resumable) for request in requests]


@dataclass(frozen=True, slots=True)
class Position:
    """How many events a client has."""

    counts: tuple[int, ...] = ()
    """With one sequence: of the whole stream. With several: of each, and of the events after their ends."""

    @classmethod
    def parse(cls, event_id: str | None, key: str, num_sequences: int) -> "Position":
        """From the id of an event; None: no event. Raises RequestError for an id of another stream."""
        if event_id is None:
            return cls()
        prefix, _, counts = event_id.rpartition("/")
        if prefix != key or not _COUNTS.fullmatch(counts):
            raise RequestError(
                f"'Last-Event-ID' is no id of an event of this stream: {event_id!r:.200}",
                param="Last-Event-ID",
            )
        position = cls(tuple(map(int, counts.split("."))))
        if len(position.counts) != _num_counts(num_sequences):
            raise RequestError(
                f"'Last-Event-ID' does not fit a stream of {num_sequences} sequences: {event_id!r:.200}",
                param="Last-Event-ID",
            )
        return position


class ResumableEvents:
    """Renders the events of one stream, and leaves out the first ones, which the client has.

    Its methods run in any thread, one at a time.
    """

    def __init__(
        self,
        request: GenerateRequest,
        renderer: Renderer,
        output: OutputProcessor,
        position: Position = Position(),
    ):
        self._key = request.resume_key
        self._request = request
        self._renderer = renderer
        self._output = output
        self._counter = request.usage_counter()
        num_counts = _num_counts(len(request.request_ids))
        self._skipped = position.counts or (0,) * num_counts
        self._counts = [0] * num_counts
        self._sequences = {
            number: _Sequence(output.text_state(each, request.text))
            for each in request.requests
            for number in each.request_ids
        }
        self._stopped: list[int] = []

    def start(self) -> bytes:
        """The events before anything is generated."""
        return self._numbered(0, self._renderer.start())

    def pieces(self, updates: list[SequenceOutput]) -> Iterator[SequenceOutput]:
        """Updates without text, cut into parts that take a few milliseconds each to render."""
        for update in updates:
            for first in range(_PIECE, len(update.token_ids), _PIECE):
                piece = SequenceOutput(update.request_id, update.token_ids[first - _PIECE : first])
                piece.cached_tokens = update.cached_tokens
                yield piece
                update.cached_tokens = 0
            rest = len(update.token_ids) % _PIECE or min(len(update.token_ids), _PIECE)
            update.token_ids = update.token_ids[len(update.token_ids) - rest :]
            yield update

    def render(self, update: SequenceOutput, stream: Stream) -> bytes:
        """The events of the tokens and the end in `update`. Raises ApiError for its error."""
        number = update.request_id
        sequence = self._sequences.get(number)
        if sequence is None:  # a stop string has ended it
            return b""
        end = end_of(update)
        own = end if end is not None and (end.reason in _AFTER_TOKENS or not update.token_ids) else None
        last = len(update.token_ids) - 1
        events = []
        with call_ids(sequence.call_ids(self._key, self._request.index(update))):
            for place, token_id in enumerate(update.token_ids):
                with_token = end if place == last and own is None else None
                events.append(self._token(number, array("i", [token_id]), with_token, update, stream))
                update.cached_tokens = 0
                if number not in self._sequences:
                    return b"".join(events)
            if own is not None:
                events.append(self._token(number, array("i"), own, update, stream))
        return b"".join(events)

    def take_stopped(self) -> list[int]:
        """The sequences that stop strings have ended since the last call."""
        stopped = self._stopped
        self._stopped = []
        return stopped

    def end(self, stream: Stream) -> bytes:
        """The last events. Raises RequestError if the client's position is after them."""
        events = self._numbered(-1, self._renderer.end(self._counter.usage(stream)))
        if any(count < skipped for count, skipped in zip(self._counts, self._skipped, strict=True)):
            raise RequestError(
                f"the stream has ended with event {_joined(self._counts)}, before the one that was asked for",
                param="Last-Event-ID",
            )
        return events

    def _token(
        self, number: int, ids: "array[int]", end: Finished | None, update: SequenceOutput, stream: Stream
    ) -> bytes:
        """The events of one token, of an end, or both."""
        deltas = TokenDeltas(0, [number] if ids else [], ids.tobytes(), finished=[end] if end else [])
        done = self._output.process(deltas, self._sequences)
        events = []
        for _, new in done.updates:
            new.cached_tokens = update.cached_tokens
            events.append(self._events(new, stream))
            if new.finished:
                del self._sequences[number]
        self._stopped += done.aborts
        return b"".join(events)

    def _events(self, update: SequenceOutput, stream: Stream) -> bytes:
        events = update_events(self._renderer, self._request, self._counter, update, stream)
        return self._numbered(self._request.index(update), events)

    def _numbered(self, slot: int, events: bytes) -> bytes:
        """Server-sent events with their ids, without those that the client has."""
        if not events:
            return b""
        slot %= len(self._counts)
        if len(self._counts) == 1:
            slot = 0
        found = []
        for event in events.split(b"\n\n")[:-1]:
            self._counts[slot] += 1
            if self._counts[slot] > self._skipped[slot]:
                found.append(b"id: %b/%b\n%b\n\n" % (self._key.encode(), self._position().encode(), event))
        return b"".join(found)

    def _position(self) -> str:
        """What the client has with the event: also what is not rendered again yet of other sequences."""
        return _joined(map(max, self._counts, self._skipped))


class _Sequence:
    """What is rendered of one sequence so far."""

    __slots__ = ("num_calls", "state")

    def __init__(self, state: RequestState):
        self.state = state
        self.num_calls = 0

    def call_ids(self, key: str, index: int) -> Iterator[str]:
        """Ids for the tool calls of the sequence `index`."""
        while True:
            digest = hashlib.sha256(f"{key}/{index}/{self.num_calls}".encode()).hexdigest()
            self.num_calls += 1
            yield f"call_{digest[:24]}"


def _joined(counts: Iterable[int]) -> str:
    return ".".join(map(str, counts))


def _num_counts(num_sequences: int) -> int:
    """One sequence has one count for all of its events; several have one more, of the events at the end."""
    return 1 if num_sequences == 1 else num_sequences + 1
