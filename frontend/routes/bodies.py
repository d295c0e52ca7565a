"""Reading of request bodies; their Content-Type is ignored."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
from aiohttp import http_exceptions, web

from frontend.errors import RequestError
from frontend.keys import BODY_MEMORY, LIMITS
from frontend.routes.errors import encoding_error

__all__ = ["check_no_fields", "open_body"]

_LARGE_CHUNK_BYTES = 1 << 16
# aiohttp decodes the last two where their packages are installed, and else refuses them itself.
_ENCODINGS = frozenset({"identity", "gzip", "deflate", "br", "zstd"})


class _NoFields(msgspec.Struct, forbid_unknown_fields=True):
    pass


@contextlib.asynccontextmanager
async def open_body(request: web.Request) -> AsyncIterator[bytes]:
    """The whole body; its memory is accounted for until the block ends.

    Raises RequestError for a late, malformed or too large body, OverloadedError if memory is lacking.
    """
    limits = request.app[LIMITS]
    memory = request.app[BODY_MEMORY]
    if (request.content_length or 0) > limits.max_body_bytes:
        raise _too_large(limits.max_body_bytes)
    if request.headers.get("Content-Encoding", "identity").lower() not in _ENCODINGS:
        raise encoding_error()
    body = bytearray()
    try:
        try:
            async with asyncio.timeout(limits.body_deadline_s):
                # A compressed body is decompressed in chunks of bounded size.
                async for chunk in request.content.iter_any():
                    if len(body) + len(chunk) > limits.max_body_bytes:
                        raise _too_large(limits.max_body_bytes)
                    memory.reserve(len(chunk))
                    body += chunk
                    if len(chunk) >= _LARGE_CHUNK_BYTES:
                        await asyncio.sleep(0)  # the next chunk may be decompressed without any wait
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
        memory.release(len(body))


async def check_no_fields(request: web.Request) -> None:
    """Raise RequestError for parameters or fields sent to a route without any; {} and no body have none."""
    for name in request.query:
        raise RequestError(f"unknown parameter {name!r:.80}: {request.path} has none", param=name)
    async with open_body(request) as body:
        try:
            msgspec.json.decode(body or b"{}", type=_NoFields)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"{request.path} has no fields, send no body: {error}") from None


def _too_large(limit: int) -> RequestError:
    return RequestError(
        f"the request body exceeds {limit} bytes: send less, or start the server with a larger "
        "--max-body-bytes",
        status=413,
    )
