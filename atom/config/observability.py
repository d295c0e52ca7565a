"""What the engine writes down about itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ObservabilityConfig:
    step_trace: str | None = None
    """Directory for files of JSON lines on when each step was sent, computed and answered."""
    torch_profiler_dir: str | None = None
    """Directory for profiler traces, a folder for each rank; lets profiling be started and stopped."""
    mark_trace: bool = False
    """Profiler traces also say which module of the model each kernel belongs to."""
