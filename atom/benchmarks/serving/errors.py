"""The error type of the benchmarks."""

__all__ = ["BenchmarkError"]


class BenchmarkError(Exception):
    """The benchmark cannot run; the text is one line that says what to change."""
