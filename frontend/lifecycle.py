"""Counts running requests, and refuses new ones during shutdown."""

import asyncio
import contextlib
from collections.abc import Iterator

from frontend.errors import UnavailableError

__all__ = ["Lifecycle"]


class Lifecycle:
    """Counts the requests in progress; after `drain` it admits no new ones."""

    def __init__(self) -> None:
        self.running = 0
        """Requests in progress."""
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def check_open(self) -> None:
        """Raises UnavailableError once the server is stopping."""
        if self._draining:
            raise UnavailableError("the server is stopping")

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Count one request during the block; raises UnavailableError once the server is stopping."""
        self.check_open()
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Admit no new requests, and wait up to `timeout_s` for the running ones to finish."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
