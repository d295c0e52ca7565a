"""The listening sockets of the other frontends of this node.

The kernel spreads connections over the sockets of all frontends, whether or not their processes run. So the
connections of one that has ended, or does not respond, are accepted by the others until it is back: no client
waits for its restart.
"""

import asyncio
import socket
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from atom.shared.utils.logger import get_logger

__all__ = ["OtherSockets"]


class _Listener(Protocol):
    async def start(self) -> None:
        """Accept connections. Raises OSError."""

    async def stop(self) -> None:
        """Accept no more, and close the socket."""


class OtherSockets:
    """Accepts on those sockets whose frontends are down, from `start` to `stop`."""

    def __init__(self, descriptors: Mapping[int, int]):
        """`descriptors`: by number of the frontend; from now on they are closed here."""
        self._sockets = {index: socket.socket(fileno=fd) for index, fd in descriptors.items()}
        self._down: set[int] = set()
        self._changed = asyncio.Event()
        self._listeners: dict[int, _Listener] = {}
        self._task: asyncio.Task[None] | None = None

    def set_down(self, frontends: Collection[int]) -> None:
        """The frontends, of all nodes, that accept no connections now."""
        self._down = self._sockets.keys() & frontends
        self._changed.set()

    def start(self, listen: Callable[[socket.socket], _Listener]) -> None:
        """In the running event loop; `listen` makes what accepts on a socket, and closes it."""
        self._task = asyncio.create_task(self._follow(listen), name="sockets of other frontends")

    async def stop(self) -> None:
        """Accept no more, and close all sockets. May be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        for index in list(self._listeners):
            await self._listeners.pop(index).stop()
        for each in self._sockets.values():
            each.close()
        self._sockets.clear()

    async def _follow(self, listen: Callable[[socket.socket], _Listener]) -> None:
        while True:
            await self._changed.wait()  # bounded by the life of the process
            self._changed.clear()
            for index in self._listeners.keys() - self._down:
                await self._listeners.pop(index).stop()
            for index in self._down - self._listeners.keys():
                try:
                    listener = listen(self._sockets[index].dup())
                    await listener.start()
                except OSError as error:
                    get_logger().error("connections of frontend %d wait for it: %s", index, error)
                else:
                    self._listeners[index] = listener
