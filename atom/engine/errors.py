"""The library's own errors."""

__all__ = ["EngineDeadError"]


class EngineDeadError(RuntimeError):
    """The engine's processes have ended; the text names the process and the cause."""
