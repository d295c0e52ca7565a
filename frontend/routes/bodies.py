"""Request bodies. They are read as JSON whatever their Content-Type says."""

import asyncio

from aiohttp import http_exceptions, web

from frontend.errors import RequestError
from frontend.keys import LIMITS

__all__ = ["read_body"]


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises RequestError for one that is late or broken on the way."""
    deadline_s = request.app[LIMITS].body_deadline_s
    try:
        async with asyncio.timeout(deadline_s):
            return await request.read()
    except TimeoutError:
        raise RequestError(f"the request body did not arrive within {deadline_s:g} s", status=408) from None
    except (web.RequestPayloadError, http_exceptions.HttpProcessingError):
        raise RequestError("the request body breaks its own encoding or length") from None
