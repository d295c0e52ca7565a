"""GET /v1/requests/{id}: where the time of a request went, and what it had of the prefix cache."""

import msgspec
from aiohttp import web

from frontend.api.generation.request_info import report
from frontend.errors import RequestError
from frontend.keys import CLIENT
from frontend.routes.access import TENANT

__all__ = ["routes"]

_MAX_ID = 256

routes = web.RouteTableDef()


@routes.get("/v1/requests/{id}")
async def show_request(request: web.Request) -> web.Response:
    """A request that runs or has ended lately, sent with the same API key."""
    name = request.match_info["id"]
    if len(name) > _MAX_ID:
        raise RequestError(f"an id has at most {_MAX_ID} characters", param="id")
    answers = await request.app[CLIENT].control.requests(name)
    body = msgspec.json.encode(report(name, answers, request[TENANT]))
    return web.Response(body=body, content_type="application/json")
