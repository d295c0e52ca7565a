"""Counts running requests, and refuses and ends requests during shutdown."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Protocol

from frontend.errors import UnavailableError

__all__ = ["Lifecycle"]


class Listener(Protocol):
    """Accepts connections from `start` to `stop`, which closes its socket."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


Listen = Callable[[socket.socket], Listener]


class Lifecycle:
    """The requests in progress; `drain` lets them finish, `interrupt` ends them with an error."""

    def __init__(self) -> None:
        self.running = 0
        """Requests in progress."""
        self.is_draining = False
        """Whether new requests are refused, until the end or until an administrator ends it."""
        self.left = asyncio.Event()
        """Set while another server has the listening sockets: this one ends after its connections."""
        self.stays = asyncio.Event()
        """Set while it is not."""
        self.stays.set()
        self._sockets: list[tuple[socket.socket, Listen]] = []
        self._listeners: list[Listener] = []
        self._moves = asyncio.Lock()
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

    async def listen(self, listening: socket.socket, listen: Listen) -> None:
        """Accept connections on a socket, but not between `leave` and `come_back`. Raises OSError."""
        async with self._moves:
            self._sockets.append((listening, listen))
            if not self.left.is_set():  # as it is where this process starts while the server is replaced
                await self._start(listening, listen)

    async def _start(self, listening: socket.socket, listen: Listen) -> None:
        listener = listen(listening.dup())
        await listener.start()
        self._listeners.append(listener)

    async def leave(self) -> None:
        """Accept no further connections; requests on those that there are are served. May be called twice."""
        async with self._moves:
            listeners = self._listeners
            self._listeners = []
            for listener in listeners:
                await listener.stop()
            self.stays.clear()
            self.left.set()

    async def come_back(self) -> None:
        """Accept connections again: the server that had the listening sockets has died. Raises OSError."""
        async with self._moves:
            for listening, listen in self._sockets:
                await self._start(listening, listen)
            self.left.clear()
            self.stays.set()

    def close(self) -> None:
        """Close the sockets, of which listeners have copies."""
        for listening, _ in self._sockets:
            listening.close()
        self._sockets.clear()

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
