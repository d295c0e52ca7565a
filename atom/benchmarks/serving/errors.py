"""The one error that a benchmark ends with."""

__all__ = ["BenchmarkError"]


class BenchmarkError(Exception):
    """The benchmark cannot be run as asked; the text is one line that says what to change."""
