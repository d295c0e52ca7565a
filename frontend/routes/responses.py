"""GET and DELETE /v1/responses/{id}: the stored responses."""

import msgspec
from aiohttp import web

from frontend.errors import RequestError
from frontend.keys import RESPONSE_STORE
from frontend.routes.access import TENANT

__all__ = ["routes"]

_PATH = "/v1/responses/{id}"

routes = web.RouteTableDef()


@routes.get(_PATH)
async def get_response(request: web.Request) -> web.Response:
    """A stored response, complete."""
    if request.query.get("stream") == "true":
        raise RequestError(
            "a stored response cannot be streamed again: leave out 'stream'",
            param="stream",
            code="unsupported_parameter",
        )
    stored = request.app[RESPONSE_STORE].get(request[TENANT], request.match_info["id"])
    return web.Response(body=stored.body, content_type="application/json")


@routes.delete(_PATH)
async def delete_response(request: web.Request) -> web.Response:
    """Delete a stored response."""
    response_id = request.match_info["id"]
    request.app[RESPONSE_STORE].delete(request[TENANT], response_id)
    body = msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})
    return web.Response(body=body, content_type="application/json")


@routes.post(_PATH + "/cancel")
async def cancel_response(request: web.Request) -> web.Response:
    """Refused: only background responses can be cancelled, and there are none."""
    raise RequestError(
        "only responses with 'background' can be cancelled, and this server has none: "
        "close the connection of a request to abort it",
        code="unsupported_parameter",
    )
