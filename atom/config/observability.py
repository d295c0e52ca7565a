"""What the engine writes down about itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ObservabilityConfig:
    step_trace: str | None = None
    """Directory for files of JSON lines on when each step was sent, computed and answered."""
