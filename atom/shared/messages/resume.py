"""Streams that outlive their frontend: what a core keeps of them, and how another frontend gets them."""

import msgspec

MAX_RESUMABLE_BYTES = 32 * 1024 * 1024
"""Most bytes of ids and forms in one `Claimed`: a frontend accepts no larger resumable request."""
MAX_RESUMABLE_SEQUENCES = 16
"""Most sequences of one stream that can be resumed."""

RESUMED_ELSEWHERE = "a client has resumed this stream on another connection"
"""Why a sequence ends, as REFUSED, for the frontend whose stream another one has claimed."""


class EndedSequence(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A sequence that has ended, of a request whose stream can be resumed."""

    request_id: int
    output_ids: bytes
    """Packed int32."""
    reason: int
    """A FinishReason."""
    stop_token_id: int = -1
    cached_tokens: int = 0


class Resumable(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What an `AddRequest` has if its stream can be resumed at another frontend."""

    key: str
    """The id by which a client asks for the stream; nobody can guess it."""
    form: bytes
    """How a frontend renders the stream. The core does not read it."""
    first_id: int
    """The stream has `num_sequences` sequences, with the request ids from this one on."""
    num_sequences: int
    ended: list[EndedSequence] = []
    """In a replay: sequences of the same stream that have ended already."""

    @property
    def request_ids(self) -> range:
        """The ids of all sequences of the stream."""
        return range(self.first_id, self.first_id + self.num_sequences)


class Claim(msgspec.Struct, tag=7, array_like=True, frozen=True, gc=False):
    """The sender goes on with the stream `key`, whose tokens it gets from now on."""

    number: int
    key: str
    tenant: str
    """Only of a request that was sent with the API key of this tenant."""


class ClaimedSequence(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A sequence that has not ended, with all ids that it has."""

    request_id: int
    output_ids: bytes
    """Packed int32."""
    cached_tokens: int = 0


class ClaimedRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The sequences of one `AddRequest`."""

    request: bytes
    """The AddRequest, encoded, with the ids of its prompt alone."""
    sequences: list[ClaimedSequence]


class Claimed(msgspec.Struct, tag=42, array_like=True, frozen=True, gc=False):
    """The response to `Claim`: what this core has of the stream; nothing if it does not know it.

    With the number 0 nobody has asked: the frontend keeps the stream until a client resumes it.
    """

    number: int
    key: str
    requests: list[ClaimedRequest] = []
    ended: list[EndedSequence] = []
    left_s: float = 0.0
    """With number 0: seconds in which a client must resume it."""


class TakeStreams(msgspec.Struct, tag=43, array_like=True, frozen=True, gc=False):
    """The server ends: some of the core's streams go to another server, and the core forgets them.

    The response is a `Claimed` with number 0 for each, then a `Done` with how many are left.
    """

    number: int


class GetStream(msgspec.Struct, tag=24, array_like=True, frozen=True, gc=False):
    """A frontend asks its supervisor for a stream that an earlier server has handed over."""

    frontend: int
    number: int
    """Number of the question, counted by the frontend."""
    key: str
    tenant: str
    """As in Claim."""


class LeaveStream(msgspec.Struct, tag=27, array_like=True, frozen=True, gc=False):
    """A frontend ends, and another server goes on with a stream that no engine has. The response is a
    `HandedStream` without a stream."""

    frontend: int
    number: int
    """As in GetStream."""
    claimed: Claimed
    """The sequences that wait for an engine."""


class HandedStream(msgspec.Struct, tag=25, array_like=True, frozen=True, gc=False):
    """The response to `GetStream`. The supervisor has forgotten what it has sent."""

    number: int
    claimed: list[Claimed] = []
    """What each engine of the earlier server had of it; empty if there is no such stream."""
    refusal: str = ""
    """Why it cannot go on here."""
    is_pending: bool = False
    """Whether an earlier server still runs, which may have it: to be asked again."""
