"""Routes for administrators, on a port or socket of their own that only this host's users can reach.

GET  /requests               the sequences that wait or run, of all frontends and engines
GET  /requests/{id}          those of one request, also for a while after its end
POST /abort_requests         end requests: {"request_ids": [...]} or {"abort_all": true}
POST /reset_prefix_cache     forget cached prompts
GET, POST /log_level         {"level": "debug"}: of all processes
POST /drain, /resume         refuse new requests, and take them again
GET, POST /restart_engines   restart all engines, one after the other
"""

from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from atom.shared.messages.admin import LogLevel
from atom.shared.utils.net import is_loopback_host
from frontend.api.generation.request_info import listed, report
from frontend.errors import RequestError
from frontend.http.json_response import json_response
from frontend.keys import CLIENT, SUPERVISOR
from frontend.routes.bodies import check_no_fields, open_body

__all__ = ["admin_access", "routes"]

T = TypeVar("T")
Id = Annotated[str, msgspec.Meta(max_length=256)]

routes = web.RouteTableDef()


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /abort_requests."""

    request_ids: Annotated[list[Id], msgspec.Meta(max_length=1024)] = []
    abort_all: bool = False


class LogLevelBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /log_level."""

    level: LogLevel


@web.middleware
async def admin_access(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse web pages: those that a browser on this host shows could send requests here."""
    if "Origin" in request.headers or "Sec-Fetch-Mode" in request.headers:
        raise RequestError("the administration does not serve web pages", status=403, code="admin_page")
    if not is_loopback_host(request.headers.get("Host", "")):
        text = "the administration is at localhost or 127.0.0.1: no other name in the Host header is served"
        raise RequestError(text, status=403, code="admin_host")
    return await handler(request)


@routes.get("/requests")
async def list_requests(request: web.Request) -> web.Response:
    """The unfinished sequences, the first 1,024 of each engine."""
    return json_response(listed(await request.app[CLIENT].control.requests()))


@routes.get("/requests/{id}")
async def show_request(request: web.Request) -> web.Response:
    """The sequences of one request."""
    name = request.match_info["id"]
    return json_response(report(name, await request.app[CLIENT].control.requests(name), tenant=None))


@routes.post("/abort_requests")
async def abort_requests(request: web.Request) -> web.Response:
    """End requests; their clients get what was generated, with finish_reason `length`."""
    async with open_body(request) as body:
        wanted = _decoded(body, AbortBody)
    if bool(wanted.request_ids) == wanted.abort_all:
        text = "send either 'request_ids', a list of ids, or 'abort_all': true"
        raise RequestError(text, param="request_ids")
    count = await request.app[CLIENT].abort_named(wanted.request_ids, wanted.abort_all)
    return json_response({"status": "success", "aborted_sequences": count})


@routes.post("/reset_prefix_cache")
async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget all cached blocks; running requests go on, and what they have computed is not reused."""
    await check_no_fields(request)
    count = await request.app[CLIENT].control.reset_prefix_cache()
    return json_response({"status": "success", "uncached_blocks": count})


@routes.get("/log_level")
async def show_log_level(request: web.Request) -> web.Response:
    """The level of all processes."""
    return json_response({"level": request.app[SUPERVISOR].state.log_level})


@routes.post("/log_level")
async def set_log_level(request: web.Request) -> web.Response:
    """Log from this level on, in all processes; debug logs the end of each request."""
    async with open_body(request) as body:
        wanted = _decoded(body, LogLevelBody)
    return await _change(request, log_level=wanted.level)


@routes.post("/drain")
async def drain(request: web.Request) -> web.Response:
    """Refuse new requests with 503; running ones go on, and /ready is 503."""
    await check_no_fields(request)
    return await _change(request, draining=True)


@routes.post("/resume")
async def resume(request: web.Request) -> web.Response:
    """Take new requests again."""
    await check_no_fields(request)
    return await _change(request, draining=False)


@routes.get("/restart_engines")
async def show_restarts(request: web.Request) -> web.Response:
    """The ranks of the engines that are not restarted yet."""
    return json_response({"left": request.app[SUPERVISOR].to_restart})


@routes.post("/restart_engines")
async def restart_engines(request: web.Request) -> web.Response:
    """Restart the engines, each once the one before is ready; their requests go on at the others."""
    await check_no_fields(request)
    link = request.app[SUPERVISOR]
    if link.to_restart:
        text = (
            f"engines are being restarted; ranks that are left: {link.to_restart}; see GET /restart_engines"
        )
        raise RequestError(text, status=409, code="restarting")
    return json_response({"status": "started", "left": await link.restart_engines()})


async def _change(request: web.Request, **values: Any) -> web.Response:
    state = await request.app[SUPERVISOR].change_state(**values)
    return json_response({"status": "success", **msgspec.structs.asdict(state)})


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is invalid: {error}") from None
