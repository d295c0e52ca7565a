"""Waits for what another thread does."""

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["until"]

_DEADLINE_S = 60.0
Found = TypeVar("Found")


def until(look: Callable[[], Found | None]) -> Found:
    """The first result that is not None."""
    deadline = time.monotonic() + _DEADLINE_S
    while (found := look()) is None:
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.001)
    return found
