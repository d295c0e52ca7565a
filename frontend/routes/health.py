"""GET /health (the process lives), /ready (a token can be made) and /version."""

from aiohttp import web

from atom.utils.version import atom_version
from frontend.errors import ApiError
from frontend.keys import CLIENT, LIFECYCLE

__all__ = ["RETRY_AFTER_S", "routes"]

RETRY_AFTER_S = 2

routes = web.RouteTableDef()

_VERSION = atom_version()


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    """200 as long as this process answers."""
    return web.json_response({"status": "ok"})


@routes.get("/ready")
async def ready(request: web.Request) -> web.Response:
    """200 when a request sent now would be served, else 503 with the reason."""
    try:
        request.app[LIFECYCLE].check_open()
        request.app[CLIENT].check_ready()
    except ApiError as error:
        return web.json_response(
            {"status": "unavailable", "reason": error.message},
            status=503,
            headers={"Retry-After": str(RETRY_AFTER_S)},
        )
    return web.json_response({"status": "ready"})


@routes.get("/version")
async def show_version(request: web.Request) -> web.Response:
    """The version of this server."""
    return web.json_response({"version": _VERSION})
