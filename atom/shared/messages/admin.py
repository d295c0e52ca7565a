"""Messages about what runs in an engine core: queries and commands of frontends, and the responses.

A frontend chooses the `number` of a query or command, and the response repeats it.
"""

from enum import IntEnum
from typing import Literal

import msgspec

LogLevel = Literal["debug", "info", "warning", "error"]


class RequestStatus(IntEnum):
    """Where a sequence is."""

    WAITING = 1
    """In the queue: new, or preempted."""
    PREFILLING = 2
    DECODING = 3
    FINISHED = 4


class Miss(IntEnum):
    """Why the prefix cache ended before the end of a prompt."""

    NONE = 0
    """It did not, or the request has not been admitted yet."""
    NEVER_CACHED = 1
    """No request with the same salt has computed this block, or its eviction is long ago."""
    EVICTED = 2
    OTHER_SALT = 3
    """The block is cached for another salt. Not for clients: it tells them about others' prompts."""
    OFF = 4
    """The cache is off, or the request asks for the log probabilities of its prompt."""


class RequestInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One sequence: where it is, what it has and how long it took. Durations are in seconds."""

    name: str
    tenant: str
    sequence: int
    """Index among the `n` sequences of its prompt."""
    status: RequestStatus
    finish_reason: int
    """A FinishReason; 0 while it is not finished."""
    queue_s: float
    """From its arrival at the core to its first admission, or until now."""
    prefill_s: float
    """From there to its first token, or until now."""
    decode_s: float
    """From there to its end, or until now."""
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache at the first admission."""
    miss: Miss
    missed_block: int
    """The first block of the prompt that was not found, from 0; -1 if there is none."""
    block_size: int
    preemptions: int
    accepted_drafts: int
    """Draft tokens among its output."""
    replays: int
    """1 if it has continued the output of an earlier run, else 0."""


class ServerState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What administrators have set; it holds for all processes, and for those that start later."""

    log_level: LogLevel = "info"
    draining: bool = False
    """Whether new requests are refused."""


class GetRequests(msgspec.Struct, tag=30, array_like=True, frozen=True, gc=False):
    """Get the sequences of the request `name`, also finished ones; "": all that are not finished."""

    number: int
    name: str = ""


class AbortNamed(msgspec.Struct, tag=31, array_like=True, frozen=True, gc=False):
    """End the sequences of these requests, or all; their frontends get a Finished with `ABORTED`."""

    number: int
    names: list[str]
    all: bool = False
    tenant: str | None = None
    """Only requests that were sent with the API key of this tenant; None: of any."""


class ResetPrefixCache(msgspec.Struct, tag=32, array_like=True, frozen=True, gc=False):
    """Forget all cached blocks; running requests keep theirs, which no other request will find."""

    number: int


class SetLogLevel(msgspec.Struct, tag=33, array_like=True, frozen=True, gc=False):
    """Log from this level on, in the core and its workers. There is no response."""

    level: LogLevel


class RequestInfos(msgspec.Struct, tag=40, array_like=True, frozen=True, gc=False):
    """The response to `GetRequests`: at most MAX_INFOS sequences, finished ones first."""

    number: int
    total: int
    requests: list[RequestInfo]


class Done(msgspec.Struct, tag=41, array_like=True, frozen=True, gc=False):
    """A command was carried out, on `count` sequences or blocks."""

    number: int
    count: int


MAX_INFOS = 1024
"""Most sequences in one response."""

Question = GetRequests | AbortNamed | ResetPrefixCache
Answer = RequestInfos | Done
