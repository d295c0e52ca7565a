"""Preflights of cross-origin requests, and the headers that let pages read responses.

A browser sends a preflight (OPTIONS) before most requests of a page from another origin, without an API
key, and shows the response to the page only if its headers allow it: also an error, and a stream.
"""

from aiohttp import web
from aiohttp.typedefs import Handler

from frontend.http.cors import METHOD, REQUESTED_HEADERS
from frontend.keys import CORS

__all__ = ["add_cors_headers", "cors_middleware"]

_MAX_AGE_S = "600"


@web.middleware
async def cors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Respond to preflights of all routes; other requests go on. Raises RequestError (403)."""
    headers = request.headers
    if request.method != "OPTIONS" or "Origin" not in headers or METHOD not in headers:
        return await handler(request)
    request.app[CORS].check(headers)
    allowed = {"Access-Control-Allow-Methods": headers[METHOD], "Access-Control-Max-Age": _MAX_AGE_S}
    if REQUESTED_HEADERS in headers:  # by name: * would not include Authorization
        allowed["Access-Control-Allow-Headers"] = headers[REQUESTED_HEADERS]
    return web.Response(status=204, headers=allowed)


async def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Let pages of allowed origins read `response`."""
    response.headers.update(request.app[CORS].response_headers(request.headers))
