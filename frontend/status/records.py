"""What the status page is told, as JSON.

State is the whole, sent once; then comes a Tick every second.
"""

import msgspec

__all__ = [
    "Event",
    "Gpu",
    "Layout",
    "Memory",
    "Point",
    "Quantiles",
    "RangeHistory",
    "Rank",
    "RequestRow",
    "State",
    "Tick",
]

Quantiles = tuple[float, float, float]
"""50th, 90th and 99th percentile, in seconds."""


class Layout(msgspec.Struct, frozen=True):
    """What does not change while the server runs."""

    version: str
    model: str
    """The name in the API."""
    architecture: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    device: str
    data_parallel_size: int
    tensor_parallel_size: int
    expert_parallel: bool
    speculation: str | None
    num_speculative_tokens: int
    prefix_caching: bool
    max_num_seqs: int
    """Limit of one engine."""
    max_queued_requests: int
    num_frontends: int
    has_chat: bool
    """Whether the model has a chat template; without one only completions are served."""


class Rank(msgspec.Struct, frozen=True):
    """The engine of one data-parallel rank."""

    rank: int
    life: int
    """Restarts so far."""
    state: str
    """starting, ready, stalled, restarting or down."""
    reason: str
    """Why the rank is not ready, as far as known."""
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    """KV blocks in use."""
    kv_cached: int = 0
    """KV blocks that are free, and in the prefix cache."""
    kv_total: int = 0
    prefill: float = 0.0
    """Tokens per second, over the last second."""
    decode: float = 0.0
    prefix_hits: int = 0
    """Prompt tokens found in the prefix cache, since the last restart, as all counters below."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    accepted_tokens: int = 0
    """Draft tokens that were accepted."""
    draft_tokens: int = 0
    """All draft tokens."""
    preemptions: int = 0


class RequestRow(msgspec.Struct, frozen=True):
    """A sequence in progress."""

    id: str
    """The id of its request, which GET /v1/requests/{id} knows; shortened where `is_hidden`."""
    rank: int
    prompt_tokens: int
    tokens: int
    """Tokens generated so far."""
    age: float
    """Seconds since its arrival."""
    queue: float | None
    """Seconds from its arrival at the engine to its admission; None before its first token."""
    rate: float | None
    """Mean tokens per second since its first token; None before the second one."""
    is_hidden: bool
    """Whether the id is kept from the page, since it would give access to a stored response."""


class Gpu(msgspec.Struct, frozen=True):
    """The memory of one GPU, in bytes."""

    used: int
    total: int


class Memory(msgspec.Struct, frozen=True):
    """The memory of the host of this frontend, in bytes."""

    used: int
    """What is not available to programs."""
    total: int
    """The limit of the control group, where that is smaller than the host's memory."""
    gpus: list[Gpu] = []
    """All GPUs of the host that its driver shows to this process; empty where the engines run on the CPU."""


class Point(msgspec.Struct, frozen=True):
    """One point of the charts: a second, or the mean of more of them."""

    at: float
    """Seconds since the epoch."""
    prefill: float
    """Tokens per second of all ranks."""
    decode: float
    running: float
    waiting: float
    requests: float
    """Sequences that ended per second, for any reason."""
    errors: float
    """HTTP responses per second with status 400 or above."""
    ttft: Quantiles | None
    """Time to first token, over the window of `latency`; None if there was none."""
    inter_token: Quantiles | None
    queue: Quantiles | None
    """Time in the waiting queue."""


class RangeHistory(msgspec.Struct, frozen=True):
    """The charts' points of a longer range."""

    range: str
    seconds_per_point: int
    points: list[Point]
    """The oldest first."""


class Event(msgspec.Struct, frozen=True):
    """One line of the event log."""

    at: float
    """Seconds since the epoch."""
    kind: str
    """The state that a rank has entered, else refused, output_limited, stalled_client or frontend."""
    text: str
    rank: int | None = None


class Tick(msgspec.Struct, frozen=True):
    """One second."""

    point: Point
    uptime: float
    """Seconds since the start of the server."""
    stopping: bool
    max_model_len: int | None
    """None before an engine was ready."""
    ranks: list[Rank]
    requests: list[RequestRow]
    """The oldest requests."""
    num_requests: int
    """Number of all requests in progress."""
    finished: dict[str, int]
    """Finished sequences by reason, since the start of the server."""
    refused: int
    responses: dict[int, int]
    """HTTP responses by status, since the start of the server."""
    memory: Memory | None
    """None where it is not known (yet)."""
    events: list[Event]
    """Events of this second."""


class State(msgspec.Struct, frozen=True):
    """All that a page shows that is opened now."""

    layout: Layout
    tick: Tick
    history: list[Point]
    """Points of the last minutes, the oldest first; the last one is the tick's."""
    events: list[Event]
    """The latest events, the oldest first, those of the tick included."""
