"""Authentication: checked before a body is read, on all routes but the health probes and the page's files."""

from aiohttp import web
from aiohttp.typedefs import Handler

from frontend.keys import API_KEYS
from frontend.routes.page import FILE_ROUTE, PAGE_ROUTE

__all__ = ["TENANT", "access_middleware"]

# Compared with the matched route, not with the raw path. An unknown path has no route.
_NO_KEY_NEEDED = frozenset({"/health", "/ready", PAGE_ROUTE, FILE_ROUTE})

TENANT = web.RequestKey("tenant", str)


@web.middleware
async def access_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raises RequestError (401) without a valid API key."""
    resource = request.match_info.route.resource
    if resource is None or resource.canonical not in _NO_KEY_NEEDED:
        request[TENANT] = request.app[API_KEYS].tenant(request.headers)
    return await handler(request)
