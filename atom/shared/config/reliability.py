"""When processes count as failed, and how often they are restarted."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True)
class ReliabilityConfig:
    hang_timeout: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds of silence after which a process counts as hung, at most 7 for one of several workers that
    compute together; a sixth of it turns its engine unready."""
    step_timeout: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds without the result of a running step after which an engine counts as hung."""
    max_restarts: Annotated[int, Meta(ge=0)] = 10
    """Restarts in a row, each ready for less than a minute, of an engine or frontend before it stays down."""
    max_replays: Annotated[int, Meta(ge=0)] = 3
    """Ends of its engine that a running request survives: it starts again with what it has generated. With 0
    it fails at once. Ends that another request has caused do not count."""
    orphan_grace: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """Seconds for which a stream that asked for it can be resumed after the end of its frontend or connection
    (X-Resumable-Stream); 0: not at all."""
