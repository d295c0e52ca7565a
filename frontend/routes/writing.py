"""Answers on their way to clients that may read slowly, or not at all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

from aiohttp import web

from atom.utils.logger import get_logger
from frontend.errors import InternalError
from frontend.keys import LIMITS, METRICS
from frontend.metrics import Metrics
from frontend.serving.sse import error_frame

__all__ = ["EventStream", "send_whole", "unbuffered", "within"]

T = TypeVar("T")

_COMMENT = b": keep-alive\n\n"
# What a transport takes without making its writer wait, if it holds nothing yet.
_SMALL_FRAME = 16 * 1024
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the tokens back
}


async def send_whole(request: web.Request, body: bytes) -> web.StreamResponse:
    """A JSON body. Sent here and not after the handler, so that draining waits for the last byte."""
    response = web.Response(body=body, content_type="application/json")
    with contextlib.suppress(ConnectionError):
        await response.prepare(request)
        await _finish(request, response)
    return response


class EventStream:
    """Server-sent events, with a comment now and then while there is nothing to send."""

    def __init__(self, request: web.Request):
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS)
        self._loop = asyncio.get_running_loop()
        self._silent = False
        # Looking twice as often as comments are due needs no clock for each frame.
        self._interval_s = request.app[LIMITS].silence_s / 2
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    async def send(self, frames: AsyncIterator[bytes]) -> web.StreamResponse:
        """Pass `frames` on until they end. A client that leaves is no error."""
        with contextlib.suppress(ConnectionError):
            await self._response.prepare(self._request)
            self._timer = self._loop.call_later(self._interval_s, self._look)
            try:
                async for frame in frames:
                    await self._write(frame)
            except ConnectionError:
                raise
            except Exception:  # the status has been sent: an answer of its own would come too late
                get_logger().exception("%s failed in the middle of a stream", self._request.path)
                await self._write(error_frame(InternalError().body()))
            finally:
                self._stop_comments()
            await _finish(self._request, self._response)
        return self._response

    async def _write(self, frame: bytes) -> None:
        self._silent = False
        if len(frame) <= _SMALL_FRAME and self._is_flowing():
            await self._response.write(frame)  # does not wait
        else:
            await _before_deadline(self._request, self._response.write(frame))

    def _is_flowing(self) -> bool:
        transport = self._request.transport
        return transport is not None and not transport.get_write_buffer_size()

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._look)
        if self._silent and self._is_flowing():
            self._comment = self._loop.create_task(self._write_comment())
        self._silent = True

    async def _write_comment(self) -> None:
        with contextlib.suppress(ConnectionError):  # the stream itself will notice
            await self._response.write(_COMMENT)

    def _stop_comments(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()


@contextlib.contextmanager
def unbuffered(transport: asyncio.WriteTransport) -> Iterator[None]:
    """Inside, writing waits until the kernel has taken all: nothing is left to a later deadline."""
    transport.set_write_buffer_limits(high=0)
    try:
        yield
    finally:
        if not transport.is_closing():
            transport.set_write_buffer_limits()


async def within(
    deadline_s: float, transport: asyncio.WriteTransport, metrics: Metrics, write: Coroutine[Any, Any, T]
) -> T:
    """The result of `write`. Past the deadline the connection is cut, with ConnectionResetError."""
    try:
        async with asyncio.timeout(deadline_s):
            return await write
    except TimeoutError:
        metrics.stalled += 1
        transport.abort()
        raise ConnectionResetError("the client does not read its answer") from None


async def _finish(request: web.Request, response: web.StreamResponse) -> None:
    if request.transport is not None:
        with unbuffered(request.transport):
            await _before_deadline(request, response.write_eof())


async def _before_deadline(request: web.Request, write: Coroutine[Any, Any, None]) -> None:
    transport = request.transport
    if transport is None:
        write.close()
        raise ConnectionResetError("the client is gone")
    await within(request.app[LIMITS].write_deadline_s, transport, request.app[METRICS], write)
