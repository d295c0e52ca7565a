"""GET /openapi.json."""

import asyncio
from functools import cache

import msgspec
from aiohttp import web

from frontend.http.json_response import encoded_response
from frontend.openapi import openapi_document

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.get("/openapi.json")
async def describe(request: web.Request) -> web.Response:
    """The OpenAPI description of the server."""
    return encoded_response(await asyncio.to_thread(_document))  # made once, in some 40 ms


@cache
def _document() -> bytes:
    return msgspec.json.encode(openapi_document())
