"""What the server knows of a request: GET /v1/requests/{id}."""

from typing import Literal

import msgspec

__all__ = ["AbortReport", "CacheMiss", "RequestList", "RequestReport", "SequenceReport"]


class CacheMiss(msgspec.Struct, frozen=True, kw_only=True):
    """The first block of the prompt that the prefix cache did not have."""

    block: int
    position: int
    """Position of its first token in the prompt."""
    reason: Literal["never_cached", "evicted", "other_salt", "cache_off"]


class SequenceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of a request, in milliseconds and tokens."""

    id: str
    index: int
    """Among the `n` sequences of its prompt."""
    status: Literal["waiting", "prefilling", "decoding", "finished"]
    finish_reason: str | None
    data_parallel_rank: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    prompt_tokens: int
    cached_tokens: int
    first_missed_block: CacheMiss | None
    generated_tokens: int
    accepted_draft_tokens: int
    preemptions: int
    replays: int


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """A request that runs, or has ended lately."""

    id: str
    object: Literal["request"] = "request"
    sequences: list[SequenceReport]


class AbortReport(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was ended on demand."""

    id: str
    object: Literal["request.abort"] = "request.abort"
    aborted_sequences: int


class RequestList(msgspec.Struct, frozen=True, kw_only=True):
    """The sequences that wait or run."""

    object: Literal["list"] = "list"
    total: int
    """Requests outside `data` count too."""
    data: list[SequenceReport]
