"""Argument types and error handling shared by the benchmarks' command lines."""

import argparse
import contextlib
import sys
from collections.abc import Iterator

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks.common.report import OUTPUT_FLAG, writable_file

__all__ = ["add_output_flag", "not_negative", "positive", "single_line_errors"]


def add_output_flag(group: argparse._ActionsContainer) -> None:
    """Add the flag for the file of a benchmark's figures."""
    group.add_argument(OUTPUT_FLAG, type=writable_file, metavar="FILE", help="write the figures as JSON")


def positive(text: str) -> int:
    """Argument type: an integer of at least 1."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """Argument type: an integer of at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is less than {least}")
    return number


@contextlib.contextmanager
def single_line_errors() -> Iterator[None]:
    """Exit with one line `error: …` and status 1 for a benchmark's errors."""
    try:
        yield
    except (BenchmarkError, ValueError, RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")
