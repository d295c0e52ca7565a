"""POST /tokenize and /detokenize."""

import msgspec
from aiohttp import web

from frontend.keys import TOKENIZATION
from frontend.routes.bodies import read_body

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text or of a conversation."""
    return _json(await request.app[TOKENIZATION].tokenize(await read_body(request)))


@routes.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    """Text of token ids."""
    return _json(await request.app[TOKENIZATION].detokenize(await read_body(request)))


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
