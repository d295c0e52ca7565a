"""The connection to one life of one engine: kept open, reopened after a loss, until it is closed.

It handles no requests: messages and losses go to the owner.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from atom.shared.messages.engine import CoreDead, FromCore, GetStats
from atom.shared.messages.launch import EngineAddress
from atom.shared.utils.liveness import PeerMonitor, heartbeat_interval
from atom.shared.utils.logger import get_logger
from frontend.engine_client.engine_link import EngineLink, LinkState
from frontend.engine_client.frame_reader import FrameReader

__all__ = ["YIELD_S", "EngineConnection"]

YIELD_S = 0.01
"""Longest time before other tasks run while there is work."""
# How long the core's last message may arrive after the end of its connection.
_FINAL_MESSAGE_S = 0.3
# Between the end of a connection and the next one.
_RECONNECT_S = 1.0


class EngineConnection:
    """Reads one engine's messages from `open` to `close`.

    `on_message` gets every message but CoreDead. `on_loss` gets the reason when the connection ends, and
    whether it is a fault of this process. A new one is opened then, since the core may only have dropped this
    frontend. While the core is silent nothing happens, until `hang_timeout`.
    """

    def __init__(
        self,
        address: EngineAddress,
        link: EngineLink,
        hang_timeout: float,
        on_message: Callable[["EngineConnection", FromCore], None],
        on_loss: Callable[["EngineConnection", str, bool], None],
    ):
        self.rank = address.rank
        self.life = address.life
        self.link = link
        self.received_at = 0.0
        """Time of the last message (monotonic, seconds)."""
        self._name = f"engine core {address.rank}"
        self._hang_timeout_s = hang_timeout
        self._on_message = on_message
        self._on_loss = on_loss
        self._monitor = PeerMonitor(hang_timeout)

    def open(self) -> None:
        """Connect, in the running event loop."""
        self.link.connect()
        self._task = asyncio.create_task(self._run(), name=self._name)
        self._task.add_done_callback(lambda _: self.link.close())

    def close(self) -> "asyncio.Task[None]":
        """The owner gets no more messages; the task returned ends once the socket is closed."""
        self._task.cancel()
        return self._task

    async def _run(self) -> None:
        try:
            while True:
                reason, is_fault = await self._serve()
                get_logger().error("the connection to %s has ended: %s", self._name, reason)
                self.link.mark_dead(reason)
                self.link.close()
                self._on_loss(self, reason, is_fault)
                await asyncio.sleep(_RECONNECT_S)
                self.link.connect()
        except asyncio.CancelledError:
            raise
        except BaseException:  # streams would wait forever: end the process, and so the server
            get_logger().critical("the frontend cannot recover its link to %s", self._name, exc_info=True)
            os._exit(1)

    async def _serve(self) -> tuple[str, bool]:
        """Process messages until the connection ends; returns the reason, and whether it is a fault here."""
        self._monitor = PeerMonitor(self._hang_timeout_s)
        work = (self._read(), self._wait_until_closed(), self._watch_silence())
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(_reason(task) for task in tasks if task.done())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> str:
        yielded_at = time.monotonic()
        with _frames_of(self.link.socket) as frames:
            self.link.after_send = frames.check
            while True:
                message = self.link.decode(await frames.recv())
                self.received_at = time.monotonic()
                self._monitor.seen(self._name)
                if isinstance(message, CoreDead):
                    return message.reason
                if self._task.cancelling():  # its sequences may run elsewhere already
                    return "it was closed"
                self._on_message(self, message)
                if time.monotonic() - yielded_at > YIELD_S:  # `recv` does not yield while messages wait
                    await asyncio.sleep(0)
                    yielded_at = time.monotonic()

    async def _wait_until_closed(self) -> str:
        monitor: Any = self.link.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            with _frames_of(monitor) as frames:
                await frames.recv()  # the only event
            self.link.mark_dead(f"{self._name} closed its connection")
            await asyncio.sleep(_FINAL_MESSAGE_S)
        finally:
            self.link.socket.disable_monitor()
            monitor.close(0)
        return f"{self._name} closed its connection"

    async def _watch_silence(self) -> str:
        """Request the core's counters about every second: a running core responds at once."""
        while not (reason := self._monitor.hung()):
            await asyncio.sleep(heartbeat_interval(self._hang_timeout_s))
            if self.link.state is not LinkState.CONNECTING:
                self.link.send(GetStats())
                self._monitor.update()
                self.link.silence = self._monitor.unresponsive
        return reason


@contextlib.contextmanager
def _frames_of(socket: "zmq.Socket[bytes]") -> Iterator[FrameReader]:
    frames = FrameReader(socket)
    try:
        yield frames
    finally:
        frames.close()


def _reason(task: "asyncio.Task[str]") -> tuple[str, bool]:
    """Why a task of a connection ended, and whether it is a fault; an error is logged, of whatever type.

    A panic of a native extension is a BaseException, but no Exception.
    """
    error = task.exception()
    if error is None:
        return task.result(), False
    get_logger().error("processing an engine core's messages failed", exc_info=error)
    return "an internal error of the frontend; the server's log has the details", True
