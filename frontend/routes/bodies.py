"""Reading of request bodies; their Content-Type is ignored."""

import asyncio

from aiohttp import http_exceptions, web

from frontend.errors import RequestError
from frontend.keys import LIMITS

__all__ = ["read_body"]


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises RequestError for a late or malformed one."""
    deadline_s = request.app[LIMITS].body_deadline_s
    try:
        async with asyncio.timeout(deadline_s):
            return await request.read()
    except TimeoutError:
        raise RequestError(f"the request body did not arrive within {deadline_s:g} s", status=408) from None
    except (web.RequestPayloadError, http_exceptions.HttpProcessingError):
        raise RequestError(
            "the request body does not match its Content-Encoding, Transfer-Encoding or Content-Length"
        ) from None
