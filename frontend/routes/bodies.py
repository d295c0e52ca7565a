"""Reading of request bodies; their Content-Type is ignored."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import http_exceptions, web

from frontend.errors import RequestError
from frontend.keys import BODY_MEMORY, LIMITS

__all__ = ["open_body"]

_LARGE_PIECE = 1 << 16


@contextlib.asynccontextmanager
async def open_body(request: web.Request) -> AsyncIterator[bytes]:
    """The whole body; its memory is accounted for until the block ends.

    Raises RequestError for a late, malformed or too large body, OverloadedError without memory for it.
    """
    limits, memory = request.app[LIMITS], request.app[BODY_MEMORY]
    if (request.content_length or 0) > limits.max_body_bytes:
        raise _too_large(limits.max_body_bytes)
    body = bytearray()
    try:
        try:
            async with asyncio.timeout(limits.body_deadline_s):
                # A compressed body is expanded in pieces of bounded size.
                async for piece in request.content.iter_any():
                    if len(body) + len(piece) > limits.max_body_bytes:
                        raise _too_large(limits.max_body_bytes)
                    memory.add(len(piece))
                    body += piece
                    if len(piece) >= _LARGE_PIECE:
                        await asyncio.sleep(0)  # expanding the next piece does not wait for the network
        except TimeoutError:
            raise RequestError(
                f"the request body did not arrive within {limits.body_deadline_s:g} s", status=408
            ) from None
        except (web.RequestPayloadError, http_exceptions.HttpProcessingError):
            raise RequestError(
                "the request body does not match its Content-Encoding, Transfer-Encoding or Content-Length"
            ) from None
        yield bytes(body)
    finally:
        memory.remove(len(body))


def _too_large(limit: int) -> RequestError:
    return RequestError(
        f"the request body exceeds {limit} bytes: send less, or start the server with a larger "
        "--max-body-bytes",
        status=413,
    )
