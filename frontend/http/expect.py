"""The Expect header, after authentication: aiohttp's own handler comes before all middlewares.

So the header is taken out of each request before aiohttp sees it, see `without_expect`.
"""

from typing import Any

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.typedefs import Handler
from multidict import CIMultiDict, CIMultiDictProxy

from frontend.errors import RequestError
from frontend.keys import LIMITS

__all__ = ["EXPECT", "expect_middleware", "without_expect"]

EXPECT = web.RequestKey("expect", str)
"""The value of the header."""
_SHOWN_CHARACTERS = 40


def without_expect(message: Any) -> tuple[Any, str]:
    """(the head of a request without Expect, the value of that header; empty without it)."""
    value = message.headers.get(hdrs.EXPECT, "")
    if not value:
        return message, ""
    headers = CIMultiDict(message.headers)
    headers.popall(hdrs.EXPECT)
    return message._replace(headers=CIMultiDictProxy(headers)), value


@web.middleware
async def expect_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Send 100 Continue if the client waits for it and its body will be read.

    Raises RequestError (417) for another expectation.
    """
    expected = request.get(EXPECT, "")
    if expected and request.version == HttpVersion11:
        if expected.lower() != "100-continue":
            shown = expected[:_SHOWN_CHARACTERS]
            raise RequestError(f"'Expect' must be 100-continue, not {shown!r}", param="Expect", status=417)
        if (request.content_length or 0) <= request.app[LIMITS].max_body_bytes:  # a larger one is not read
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # an interim response is none
    return await handler(request)
