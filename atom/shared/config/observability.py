"""Traces that the engine writes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ObservabilityConfig:
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe lines of the log; debug has one for each request. /log_level changes it later."""
    step_trace: str | None = None
    """Directory for JSON lines with the times at which each step was sent, computed and returned."""
    flight_recorder: Literal["off", "shapes", "ids"] = "shapes"
    """What is kept of the last steps and of the requests when an engine dies or hangs, in
    ATOM_CACHE_DIR/flights: lengths and parameters, or token ids too, which are as good as texts."""
    torch_profiler_dir: str | None = None
    """Directory for profiler traces, with a folder per rank; enables /start_profile."""
    mark_trace: bool = False
    """Record in profiler traces which module of the model launched each kernel."""
