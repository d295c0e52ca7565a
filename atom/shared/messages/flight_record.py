"""What an engine core writes when a process of its engine dies or hangs: one JSON file.

It has no text. Token ids, which are as good as text, are in it only with `--flight-recorder ids`.
"""

import msgspec

from atom.shared.config.engine import EngineConfig
from atom.shared.messages.engine import Sampling

FORMAT = 1
MAX_RECORD_BYTES = 64 * 1024 * 1024
"""A larger file is no record."""


class RecordedRow(msgspec.Struct, frozen=True):
    """A row of the batch that a step has given to a request."""

    row: int
    known: int
    """Tokens known then."""
    computed: int
    prompt_length: int
    num_blocks: list[int]
    """One number for each KV group."""


class RecordedStep(msgspec.Struct, frozen=True):
    """One step that was sent to the workers."""

    step: int
    rows: list[int]
    counts: list[int]
    """Tokens of each row; empty: one each, or one and `num_drafts`."""
    num_drafts: int
    new_rows: list[RecordedRow]


class RecordedRequest(msgspec.Struct, frozen=True):
    """A sequence that had not ended."""

    name: str
    """The id of its request that the client knows."""
    sequence: int
    """Index among the sequences of its prompt."""
    status: str
    row: int
    """Its row of the batch; -1 without one."""
    in_flight: bool
    """Whether a step without a result has its row."""
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    priority: int
    preemptions: int
    replays: int
    """Engines that have ended while it ran, before this one."""
    has_grammar: bool
    sampling: Sampling
    """Without logits processors unless the record has ids."""
    prompt_ids: bytes = b""
    """Packed int32, if the record has ids."""
    output_ids: bytes = b""


class FlightRecord(msgspec.Struct, frozen=True):
    """The file."""

    format: int
    atom: str
    """Version."""
    written_at: str
    reason: str
    """Why the engine ends, in one line."""
    is_hang: bool
    engine: int
    """Data-parallel rank."""
    architecture: str
    has_ids: bool
    suspects: list[str]
    """Names of the requests that may have ended it, the likeliest first."""
    num_in_flight: int
    """Steps without a result: the last ones of `steps`."""
    num_requests: int
    """Unfinished sequences; `requests` has the first ones of them."""
    requests: list[RecordedRequest]
    steps: list[RecordedStep]
    """The last ones that were sent, the latest one last."""
    config: EngineConfig
    """As it was resolved."""
