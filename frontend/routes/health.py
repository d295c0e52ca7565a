"""GET /health (the process lives) and /ready (a token can be made)."""

from aiohttp import web

from frontend.errors import ApiError
from frontend.keys import CLIENT, LIFECYCLE

__all__ = ["routes"]

routes = web.RouteTableDef()


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
            headers={"Retry-After": str(error.retry_after_s)},
        )
    return web.json_response({"status": "ready"})
