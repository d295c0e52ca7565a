"""GET /v1/models."""

import msgspec
from aiohttp import web

from frontend.keys import MODELS

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.get("/v1/models")
async def list_models(request: web.Request) -> web.Response:
    """The served models."""
    return _json(request.app[MODELS].list())


@routes.get("/v1/models/{name:.+}")
async def get_model(request: web.Request) -> web.Response:
    """One model; its name may contain slashes."""
    return _json(request.app[MODELS].get(request.match_info["name"]))


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
