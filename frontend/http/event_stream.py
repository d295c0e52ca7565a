"""Sending responses: server-sent events, and JSON; with deadlines for clients that do not read them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from aiohttp import HttpVersion11, web

from atom.shared.utils.logger import get_logger
from frontend.errors import ApiError, InternalError
from frontend.keys import LIFECYCLE, LIMITS, METRICS
from frontend.metrics.metrics import Metrics

__all__ = ["PROBE", "STREAM_ID", "EventStream", "send_json", "unbuffered", "with_deadline"]

T = TypeVar("T")

PROBE: web.RequestKey[Callable[[], None]] = web.RequestKey("probe")
"""Writes something to the client of a response that has begun, to find out whether it still reads."""

STREAM_ID = "X-Stream-Id"
"""The header with the id of a stream that can be resumed."""
_COMMENT = b": keep-alive\n\n"
# An empty transport buffers this many bytes without blocking the writer.
_SMALL_FRAME = 16 * 1024
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would buffer the tokens
}


async def send_json(request: web.Request, body: bytes, headers: Mapping[str, str]) -> web.StreamResponse:
    """Send a JSON response. Sent within the handler, so that draining waits for the last byte."""
    response = web.Response(body=body, content_type="application/json", headers=headers)
    with contextlib.suppress(ConnectionError):
        await response.prepare(request)
        await _finish(request, response)
    return response


class EventStream:
    """A stream of server-sent events, with comments as keep-alive while there are no events."""

    def __init__(
        self,
        request: web.Request,
        render_error: Callable[[ApiError], bytes],
        headers: Mapping[str, str] = MappingProxyType({}),
    ):
        self._request = request
        self._render_error = render_error
        self._response = web.StreamResponse(headers={**_HEADERS, **headers})
        self._loop = asyncio.get_running_loop()
        self._is_silent = False
        self._is_finished = False
        self._has_begun = False
        self._is_chunked = request.version >= HttpVersion11
        # A timer at twice the comment rate avoids reading the clock for each frame.
        self._interval_s = request.app[LIMITS].silence_s / 2
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    async def send(self, frames: AsyncIterator[bytes]) -> web.StreamResponse:
        """Send all `frames`. A client that disconnects is not an error."""
        with contextlib.suppress(ConnectionError):
            await self._response.prepare(self._request)
            self._request[PROBE] = self._send_comment
            self._timer = self._loop.call_later(self._interval_s, self._check_silence)
            try:
                with self._request.app[LIFECYCLE].interruptible():
                    async for frame in frames:
                        await self._write(frame)
            except ConnectionError:
                raise
            except ApiError as error:  # the status line is sent: only an error event can follow
                if self._is_handed_over():
                    self._cut_off()
                await self._write_error(error)
            except Exception:
                get_logger().exception("%s failed in the middle of a stream", self._request.path)
                await self._write_error(InternalError())
            finally:
                self._stop_comments()
            await _finish(self._request, self._response)
        return self._response

    def can_write(self) -> bool:
        """Whether `write_now` may be called: the first frame is sent, and the client has read all so far."""
        return self._has_begun and self._is_flowing()

    def write_now(self, frame: bytes) -> None:
        """Write a frame from outside the iterator that `send` reads, which waits for its next one.

        To the transport itself: aiohttp's writer takes as much time as the write.
        """
        transport = self._request.transport
        assert transport is not None, "only after `can_write`"
        self._is_silent = False
        transport.write(b"%x\r\n%b\r\n" % (len(frame), frame) if self._is_chunked else frame)

    async def _write(self, frame: bytes) -> None:
        self._is_silent = False
        if len(frame) <= _SMALL_FRAME and self._is_flowing():
            await self._response.write(frame)  # does not block
        else:
            await _before_deadline(self._request, self._response.write(frame))
        self._has_begun = True

    def _is_handed_over(self) -> bool:
        return STREAM_ID in self._response.headers and self._request.app[LIFECYCLE].hands_over

    def _cut_off(self) -> None:
        """Break the connection: the client resumes the stream at the server that replaces this one."""
        if self._request.transport is not None:
            self._request.transport.abort()
        raise ConnectionResetError("another server goes on with this stream")

    async def _write_error(self, error: ApiError) -> None:
        await self._write(self._render_error(error))

    def _is_flowing(self) -> bool:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return False
        return not transport.get_write_buffer_size()

    def _check_silence(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._check_silence)
        if self._is_silent:
            self._send_comment()
        self._is_silent = True

    def _send_comment(self) -> None:
        if self._is_flowing() and not self._is_finished:
            self._comment = self._loop.create_task(self._write_comment())

    async def _write_comment(self) -> None:
        with contextlib.suppress(ConnectionError):  # `send` handles it
            await self._response.write(_COMMENT)

    def _stop_comments(self) -> None:
        self._is_finished = True
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()


@contextlib.contextmanager
def unbuffered(transport: asyncio.WriteTransport) -> Iterator[None]:
    """Inside the block, a write waits until the kernel has accepted all bytes."""
    transport.set_write_buffer_limits(high=0)
    try:
        yield
    finally:
        if not transport.is_closing():
            transport.set_write_buffer_limits()


async def with_deadline(
    deadline_s: float, transport: asyncio.WriteTransport, metrics: Metrics, write: Coroutine[Any, Any, T]
) -> T:
    """The result of `write`; on timeout, closes the connection and raises ConnectionResetError."""
    try:
        async with asyncio.timeout(deadline_s):
            return await write
    except TimeoutError:
        metrics.stalled += 1
        transport.abort()
        raise ConnectionResetError("the client does not read its response") from None


async def _finish(request: web.Request, response: web.StreamResponse) -> None:
    if request.transport is not None:
        with unbuffered(request.transport):
            await _before_deadline(request, response.write_eof())


async def _before_deadline(request: web.Request, write: Coroutine[Any, Any, None]) -> None:
    transport = request.transport
    if transport is None:
        write.close()
        raise ConnectionResetError("the client has disconnected")
    await with_deadline(request.app[LIMITS].write_deadline_s, transport, request.app[METRICS], write)
