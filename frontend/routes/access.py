"""Who may come in. Decided before a body is read, for every route but the two that probes need."""

from aiohttp import web
from aiohttp.typedefs import Handler

from frontend.keys import API_KEYS

__all__ = ["TENANT", "access_middleware"]

# By the route that was found, not by how its path was written. An unknown route has no name.
_OPEN = frozenset({"/health", "/ready"})

TENANT = web.RequestKey("tenant", str)


@web.middleware
async def access_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raises RequestError (401) for a request without a right key."""
    resource = request.match_info.route.resource
    if resource is None or resource.canonical not in _OPEN:
        request[TENANT] = request.app[API_KEYS].tenant(request.headers)
    return await handler(request)
