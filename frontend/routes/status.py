"""GET /status, /status/events and /status/history/{range}: what the status page shows."""

import contextlib

from aiohttp import web

from frontend.errors import ApiError
from frontend.http.event_stream import EventStream
from frontend.keys import STATUS

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.get("/status")
async def status(request: web.Request) -> web.Response:
    """The whole state."""
    return _json(await request.app[STATUS].state())


@routes.get("/status/history/{range}")
async def history(request: web.Request) -> web.Response:
    """The points of the charts over 5m, 1h or 6h."""
    return _json(request.app[STATUS].history(request.match_info["range"]))


@routes.get("/status/events", allow_head=False)
async def events(request: web.Request) -> web.StreamResponse:
    """Server-sent events: the whole state, then a tick a second; 503 when too many clients listen."""
    feed = request.app[STATUS]
    with feed.listening():
        async with contextlib.aclosing(feed.frames()) as frames:
            return await EventStream(request, _error).send(frames)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})


def _error(error: ApiError) -> bytes:
    return b"event: error\ndata: %b\n\n" % error.body()
