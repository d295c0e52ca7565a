"""How long processes may be silent, and steps may take, before the engine ends."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True)
class ReliabilityConfig:
    hang_timeout: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds of silence of a worker or the core that end the server; a sixth of it turns `/ready` 503."""
    step_timeout: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds without the result of a running step that end the server."""
