"""Counts running requests, and refuses and ends requests during shutdown."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Protocol

from frontend.errors import UnavailableError

__all__ = ["Lifecycle"]


class Listener(Protocol):
    """Accepts connections until `stop`."""

    async def stop(self) -> None: ...


class Lifecycle:
    """The requests in progress; `drain` lets them finish, `interrupt` ends them with an error."""

    def __init__(self) -> None:
        self.running = 0
        """Requests in progress."""
        self.is_draining = False
        """Whether new requests are refused, until the end or until an administrator ends it."""
        self.left = asyncio.Event()
        """Set once another server has the listening sockets: this one ends after its connections."""
        self._listeners: list[Listener] = []
        self._is_stopping = False
        self._is_interrupted = False
        self._interruptible: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def check_open(self) -> None:
        """Raises UnavailableError once the server is stopping or draining."""
        if self._is_stopping:
            raise UnavailableError("the server is stopping")
        if self.is_draining:
            raise UnavailableError("the server is draining: it takes no new requests")

    def set_draining(self, draining: bool) -> None:
        """Refuse new requests, or take them again unless the server is stopping."""
        self.is_draining = draining or self._is_stopping

    @property
    def hands_over(self) -> bool:
        """Whether another server goes on with the streams that are unfinished now."""
        return self.left.is_set() and self._is_interrupted

    def listens(self, listener: Listener) -> None:
        """`leave` stops this one."""
        self._listeners.append(listener)

    async def leave(self) -> None:
        """Accept no further connections; requests on those that there are are served. May be called twice."""
        listeners = self._listeners
        self._listeners = []
        for listener in listeners:
            await listener.stop()
        self.left.set()

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Count one request during the block; raises UnavailableError as `check_open`."""
        self.check_open()
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block that `interrupt` cancels; it then raises UnavailableError."""
        stopping = UnavailableError("the server is stopping; the request was not finished")
        if self._is_interrupted:
            raise stopping
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        self._interruptible.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # A disconnect cancels the task too, and takes precedence.
            if self._is_interrupted and task.uncancel() <= cancelling:
                raise stopping from None
            raise
        finally:
            self._interruptible.discard(task)

    async def drain(self, timeout_s: float) -> None:
        """Admit no new requests, and wait up to `timeout_s` for the running ones to finish."""
        self.is_draining = self._is_stopping = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def interrupt(self, timeout_s: float) -> None:
        """End all requests with an error response, and wait up to `timeout_s` until these are sent."""
        self._is_interrupted = True
        for task in self._interruptible:
            task.cancel()
        await self.drain(timeout_s)
