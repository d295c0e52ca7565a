"""GET /health (the process responds) and /ready (the engine can generate tokens)."""

from aiohttp import web

from frontend.errors import ApiError
from frontend.keys import CLIENT, LIFECYCLE

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    """Always 200."""
    return web.json_response({"status": "ok"})


@routes.get("/ready")
async def ready(request: web.Request) -> web.Response:
    """200 when requests are served, and all engines have started; else 503 with the reason."""
    try:
        request.app[LIFECYCLE].check_open()
        client = request.app[CLIENT]
        client.check_ready()
        client.engines.check_started()
    except ApiError as error:
        return web.json_response(
            {"status": "unavailable", "reason": error.message},
            status=503,
            headers={"Retry-After": str(error.retry_after_s)},
        )
    return web.json_response({"status": "ready"})
