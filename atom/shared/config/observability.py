"""Traces that the engine writes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ObservabilityConfig:
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe lines of the log; debug has one for each request. /log_level changes it later."""
    step_trace: str | None = None
    """Directory for JSON lines with the times at which each step was sent, computed and returned."""
    torch_profiler_dir: str | None = None
    """Directory for profiler traces, with a folder per rank; enables /start_profile."""
    mark_trace: bool = False
    """Record in profiler traces which module of the model launched each kernel."""
