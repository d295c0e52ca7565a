"""HTTP connections: limits, deadlines and the errors of requests that reach no route."""

import asyncio
import socket
import ssl
from typing import Any

import aiohttp
from aiohttp import HttpVersion11, http_exceptions, web

from atom.shared.utils.logger import get_logger
from frontend.errors import InternalError, RequestError
from frontend.http.event_stream import PROBE, unbuffered, with_deadline
from frontend.http.expect import EXPECT, without_expect
from frontend.http.limits import HttpLimits
from frontend.metrics.metrics import Metrics
from frontend.routes.errors import add_request_id, encoding_error, error_response, http_exception_response

__all__ = ["Listener", "check_aiohttp"]

_BACKLOG = 1024
_LAST_READ_S = 0.01
# Most bytes parsed at once: they may be thousands of chunks of one byte each.
_PIECE = 32 * 1024
# How long a closed connection waits for the client's part of the end of TLS.
_TLS_CLOSE_S = 2.0
# Intervals of probes of a half-closed connection: short at first, since the second probe fails if the
# client is gone.
_FIRST_PROBE_S = 0.01
_LAST_PROBE_S = 15.0
# What `Connection` uses of its base class that aiohttp does not promise to keep.
_INTERNALS = (
    "_buffer_paused",
    "_current_request",
    "_keepalive_handle",
    "_next_keepalive_close_time",
    "_pause_transport_reading",
    "_process_keepalive",
    "_reading_paused",
    "_request_factory",
    "_resume_transport_reading",
    "_waiter",
)


class Connection(web.RequestHandler):
    """aiohttp's protocol with deadlines; its own error responses are OpenAI error objects too.

    A client may close its sending side after a request and still gets the response. The end of a
    connection looks the same, so interim responses are sent: a closed peer then resets the connection,
    which cancels the request.
    """

    __slots__ = (
        "_has_received",
        "_is_extended",
        "_is_half_closed",
        "_is_parsing",
        "_limits",
        "_metrics",
        "_new_request",
        "_unparsed",
    )

    def __init__(
        self, server: web.Server, loop: asyncio.AbstractEventLoop, limits: HttpLimits, metrics: Metrics
    ):
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=limits.keepalive_s,
            max_line_size=limits.max_line_bytes,
            max_field_size=limits.max_line_bytes,
            max_headers=limits.max_headers,
            access_log=None,  # type: ignore[arg-type]  # None is how aiohttp turns it off
        )
        self._metrics = metrics
        self._limits = limits
        self._has_received = False  # since the last response
        self._is_extended = True
        self._is_half_closed = False
        self._unparsed = b""
        self._is_parsing = False  # whether `_parse` is going to run
        self._new_request = self._request_factory
        self._request_factory = self._request

    def _request(self, message: Any, *parts: Any) -> web.BaseRequest:
        assert self._new_request is not None
        message, expected = without_expect(message)
        request = self._new_request(message, *parts)
        if expected:
            request[EXPECT] = expected
        return request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the deadline of the first request's head."""
        super().connection_made(transport)
        self._close_idle_in(self._limits.head_deadline_s)

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client, in pieces with turns for other tasks in between."""
        if not data:  # aiohttp continues with what its parser holds
            super().data_received(data)
            return
        self._has_received = True
        self._unparsed += data
        if not self._is_parsing:
            self._parse()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Parse and read on; called when the handler has read most of the body so far."""
        super().resume_reading(resume_parser)
        if self._unparsed:
            self._parse_soon()

    def _parse_soon(self) -> None:
        self._pause_transport_reading()
        if not self._is_parsing:
            self._is_parsing = True
            self._loop.call_soon(self._parse)

    def _parse(self) -> None:
        self._is_parsing = False
        if self._reading_paused or self.transport is None:  # until `resume_reading`
            return
        piece = self._unparsed[:_PIECE]
        self._unparsed = self._unparsed[_PIECE:]
        super().data_received(piece)
        if self._unparsed:
            self._parse_soon()
        elif not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads the result
        """Whether the connection stays open for a response; probes whether the client still reads."""
        if self.transport is None or self._is_idle() or self._is_encrypted():
            return False  # it is being closed, or TLS, which cannot be half closed
        self._is_half_closed = True
        self._probe(_FIRST_PROBE_S)
        return True

    def _probe(self, next_s: float) -> None:
        request = self._current_request
        if self.transport is None:
            return
        is_incomplete = request is not None and not request.content.is_eof() and not self._unparsed
        if self._is_idle() or is_incomplete:
            self.transport.close()  # no request, or the rest of one, can arrive
            return
        if request is None:
            pass  # its handler has not started, or its response is being sent
        elif (probe := request.get(PROBE)) is not None:
            probe()
        elif request.version < HttpVersion11:  # has no interim responses
            self.transport.close()
        elif not request.writer.output_size:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._loop.call_later(next_s, self._probe, min(2 * next_s, _LAST_PROBE_S))

    def _is_idle(self) -> bool:
        """Whether no request has arrived completely and is unanswered."""
        return self._waiter is not None and not self._waiter.done() and not self._unparsed

    def _is_encrypted(self) -> bool:
        assert self.transport is not None, "it has a connection"
        return self.transport.get_extra_info("ssl_object") is not None

    def _close_idle_in(self, delay_s: float) -> None:
        if self._keepalive_handle is not None:
            self._keepalive_handle.cancel()
        self._next_keepalive_close_time = self._loop.time() + delay_s
        self._keepalive_handle = self._loop.call_at(self._next_keepalive_close_time, self._process_keepalive)

    def _process_keepalive(self) -> None:
        """Close a connection whose idle time is over, unless a request has just arrived."""
        if self._loop.time() < self._next_keepalive_close_time or not self._is_idle():
            super()._process_keepalive()
            return
        # Timers run before sockets are read: bytes that arrived while the loop was busy come first.
        self._keepalive_handle = self._loop.call_later(_LAST_READ_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._keepalive_handle = None
        if not self._is_idle():
            return
        if self._has_received and not self._is_extended:  # part of a head: extend the time once
            self._is_extended = True
            self._close_idle_in(self._limits.head_deadline_s)
        else:
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to input that is not a valid HTTP request; it closes the connection."""
        if request.writer.output_size:
            raise ConnectionError("the response has begun: an error response cannot follow inside it")
        if status >= 500:
            get_logger().error("a connection failed", exc_info=exc)
            response = error_response(InternalError())
        else:
            response = error_response(_broken_request(exc))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a handler's response; aiohttp's own exceptions become error objects."""
        if isinstance(resp, web.HTTPException):
            resp = http_exception_response(resp, "the request")
        if not resp.prepared:  # the request never reached the application and its signals
            await add_request_id(request, resp)
        if request.content.exception() is not None:
            self._lingering_time = 0.0  # nothing can be read after a malformed body
            resp.force_close()
        elif not request.content.is_eof() and "Content-Encoding" in request.headers:
            self._lingering_time = 0.0  # the rest of a refused body is not decompressed
            resp.force_close()
        if self._is_half_closed and not self._messages:
            resp.force_close()
        self._has_received = self._is_extended = False
        if self._keepalive_handle is not None:  # the idle time begins after this response
            self._keepalive_handle.cancel()
            self._keepalive_handle = None
        self._metrics.responses[resp.status] += 1
        sending = super().finish_response(request, resp, start_time)
        transport = self.transport
        if transport is None:
            return await sending
        with unbuffered(transport):
            return await with_deadline(self._limits.write_deadline_s, transport, self._metrics, sending)


class Listener(web.BaseSite):
    """Accepts connections from a bound socket; with `tls` encrypted ones.

    Raises ImportError for a version of aiohttp that works in another way.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        limits: HttpLimits,
        metrics: Metrics,
        tls: ssl.SSLContext | None = None,
    ):
        super().__init__(runner, backlog=_BACKLOG, ssl_context=tls)
        check_aiohttp()
        self._listener = listener
        self._limits = limits
        self._metrics = metrics

    @property
    def name(self) -> str:
        if self._listener.family == socket.AF_UNIX:
            return f"unix:{self._listener.getsockname()}"
        host, port = self._listener.getsockname()[:2]
        return f"{'http' if self._ssl_context is None else 'https'}://{host}:{port}"

    async def start(self) -> None:
        await super().start()
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()

        def accept() -> Connection:
            return Connection(server, loop, self._limits, self._metrics)

        if self._listener.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(accept, sock=self._listener, backlog=self._backlog)
            return
        self._server = await loop.create_server(
            accept,
            sock=self._listener,
            backlog=self._backlog,
            ssl=self._ssl_context,
            ssl_handshake_timeout=None if self._ssl_context is None else self._limits.handshake_deadline_s,
            ssl_shutdown_timeout=None if self._ssl_context is None else _TLS_CLOSE_S,
        )

    async def stop(self) -> None:
        """Accept no more; without effect if its runner, which has ended, has stopped it."""
        if self in self._runner.sites:
            await super().stop()


def check_aiohttp() -> None:
    """Raise ImportError for a version of aiohttp that works in another way."""
    missing = [name for name in _INTERNALS if not hasattr(web.RequestHandler, name)]
    if missing:
        raise ImportError(
            f"aiohttp {aiohttp.__version__} does not fit: its RequestHandler has no {', '.join(missing)}. "
            'Install a version that ATOM was tested with: pip install "aiohttp>=3.14,<3.15"'
        )


def _broken_request(exc: BaseException | None) -> RequestError:
    if isinstance(exc, http_exceptions.LineTooLong):
        return RequestError("a line of the request's head is too long", status=431)
    if isinstance(exc, http_exceptions.ContentEncodingError):
        return encoding_error()
    # The parser quotes the offending bytes below the first line.
    problem = str(getattr(exc, "message", "")).partition("\n")[0].rstrip(": ")
    return RequestError(f"this is not a valid HTTP/1.1 request: {problem or 'it cannot be parsed'}")
