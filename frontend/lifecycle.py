"""Whether this process takes new work, and when its running work is done."""

import asyncio
import contextlib
from collections.abc import Iterator

from frontend.errors import UnavailableError

__all__ = ["Lifecycle"]


class Lifecycle:
    """Counts the requests that are being answered; after `drain` it lets no new one in."""

    def __init__(self) -> None:
        self.running = 0
        """Requests that are being answered."""
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def check_open(self) -> None:
        """Raises UnavailableError once the server is stopping."""
        if self._draining:
            raise UnavailableError("the server is stopping")

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a request for the block; raises UnavailableError once the server is stopping."""
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
        """Let nothing new in, and wait for the rest to end, at most `timeout_s`."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
