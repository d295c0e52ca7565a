"""GET /v1/models."""

from aiohttp import web

from frontend.http.json_response import json_response
from frontend.keys import MODELS

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.get("/v1/models")
async def list_models(request: web.Request) -> web.Response:
    """The served models."""
    return json_response(request.app[MODELS].list())


@routes.get("/v1/models/{name:.+}")
async def get_model(request: web.Request) -> web.Response:
    """One model; its name may contain slashes."""
    return json_response(request.app[MODELS].get(request.match_info["name"]))
