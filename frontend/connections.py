"""HTTP connections: limits, deadlines and the errors of requests that reach no route."""

import asyncio
import socket

from aiohttp import HttpVersion11, http_exceptions, web

from atom.utils.logger import get_logger
from frontend.errors import InternalError, RequestError
from frontend.limits import HttpLimits
from frontend.metrics import Metrics
from frontend.routes.errors import add_request_id, error_response, http_exception_response
from frontend.routes.writing import PROBE, unbuffered, with_deadline

__all__ = ["Listener"]

_BACKLOG = 1024
_LAST_READ_S = 0.01
# Probes of a half-closed connection: the first two follow closely, since the second one fails where the
# client has gone.
_FIRST_PROBE_S, _LAST_PROBE_S = 0.01, 15.0


class Connection(web.RequestHandler):
    """aiohttp's protocol with deadlines; its own error responses are OpenAI error objects too.

    A client may close its sending side after a request and still gets the response. The end of a
    connection looks the same, so interim responses are sent: a closed peer answers with a reset, which
    cancels the request.
    """

    __slots__ = ("_has_received", "_is_extended", "_is_half_closed", "_limits", "_metrics")

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
        self._has_received = False
        self._is_extended = False
        self._is_half_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the deadline of the first request's head."""
        super().connection_made(transport)
        self._close_idle_in(self._limits.head_deadline_s)

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client."""
        self._has_received = True
        super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads the result
        """Whether the connection stays open for a response; probes whether the client still reads."""
        if self._is_idle():
            return False
        self._is_half_closed = True
        self._probe(_FIRST_PROBE_S)
        return True

    def _probe(self, next_s: float) -> None:
        request = self._current_request
        if self.transport is None:
            return
        if self._is_idle() or (request is not None and not request.content.is_eof()):
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
        return self._waiter is not None and not self._waiter.done()

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
        self._has_received = False
        self._keepalive_handle = self._loop.call_later(_LAST_READ_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._keepalive_handle = None
        if not self._is_idle():
            return
        if self._has_received and not self._is_extended:  # a part of a head: time for the rest, once
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
        """Send a handler's response; aiohttp's own exceptions are turned into error objects first."""
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
        self._is_extended = False
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
    """Accepts connections from a bound socket."""

    def __init__(self, runner: web.AppRunner, listener: socket.socket, limits: HttpLimits, metrics: Metrics):
        super().__init__(runner, backlog=_BACKLOG)
        self._listener = listener
        self._limits = limits
        self._metrics = metrics

    @property
    def name(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://{host}:{port}"

    async def start(self) -> None:
        await super().start()
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(server, loop, self._limits, self._metrics),
            sock=self._listener,
            backlog=self._backlog,
        )


def _broken_request(exc: BaseException | None) -> RequestError:
    if isinstance(exc, http_exceptions.LineTooLong):
        return RequestError("a line of the request's head is too long", status=431)
    # The parser quotes the offending bytes below the first line.
    problem = str(getattr(exc, "message", "")).partition("\n")[0].rstrip(": ")
    return RequestError(f"this is not a valid HTTP/1.1 request: {problem or 'it cannot be parsed'}")
