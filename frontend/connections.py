"""HTTP connections: limits, deadlines and the errors of requests that reach no route."""

import asyncio
import socket

from aiohttp import http_exceptions, web

from atom.utils.logger import get_logger
from frontend.errors import InternalError, RequestError
from frontend.limits import HttpLimits
from frontend.metrics import Metrics
from frontend.routes.errors import add_request_id, error_response, http_exception_response
from frontend.routes.writing import unbuffered, with_deadline

__all__ = ["Listener"]

_BACKLOG = 1024


class Connection(web.RequestHandler):
    """aiohttp's protocol with deadlines; its own error responses are OpenAI error objects too."""

    __slots__ = ("_metrics", "_write_deadline_s")

    def __init__(
        self, server: web.Server, loop: asyncio.AbstractEventLoop, limits: HttpLimits, metrics: Metrics
    ):
        super().__init__(
            server,
            loop=loop,
            # Also bounds the time until the first request's head is complete.
            keepalive_timeout=limits.idle_deadline_s,
            max_line_size=limits.max_line_bytes,
            max_field_size=limits.max_line_bytes,
            max_headers=limits.max_headers,
            access_log=None,  # type: ignore[arg-type]  # None is how aiohttp turns it off
        )
        self._metrics = metrics
        self._write_deadline_s = limits.write_deadline_s

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
        self._metrics.responses[resp.status] += 1
        sending = super().finish_response(request, resp, start_time)
        transport = self.transport
        if transport is None:
            return await sending
        with unbuffered(transport):
            return await with_deadline(self._write_deadline_s, transport, self._metrics, sending)


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
