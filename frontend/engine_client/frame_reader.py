"""Reads frames of a ZeroMQ socket in an asyncio event loop."""

import asyncio

import zmq

__all__ = ["FrameReader"]


class FrameReader:
    """Reads a plain ZeroMQ socket; `zmq.asyncio` takes several times as long for each frame.

    The socket's file descriptor becomes readable when the socket may have frames, but also stays silent about
    frames that another call on the socket has noticed: call `check` after each send.
    """

    def __init__(self, socket: "zmq.Socket[bytes]"):
        """Watches the socket in the running event loop."""
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._has_changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._has_changed.set)

    async def recv(self) -> bytes:
        """The next frame; does not yield while there is one. The owner bounds the wait."""
        while True:
            try:
                return self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                self._has_changed.clear()
            await self._has_changed.wait()

    def check(self) -> None:
        """Let `recv` look for frames again."""
        self._has_changed.set()

    def close(self) -> None:
        """Stop watching the socket, before it is closed."""
        self._loop.remove_reader(self._fd)
