"""POST /v1/chat/completions and /v1/completions: bytes in, JSON or server-sent events out."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from aiohttp import web

from frontend.errors import RequestError
from frontend.keys import CHAT, COMPLETIONS, LIFECYCLE
from frontend.serving.generation import GenerationService

__all__ = ["routes"]

BODY_DEADLINE_S = 60.0
# A client that reads nothing for this long is gone for our purposes.
WRITE_DEADLINE_S = 120.0

routes = web.RouteTableDef()


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Continue a conversation."""
    return await _generate(request, request.app[CHAT])


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """Continue prompts."""
    return await _generate(request, request.app[COMPLETIONS])


async def _generate(request: web.Request, service: GenerationService[Any]) -> web.StreamResponse:
    with request.app[LIFECYCLE].admit():
        job = await service.prepare(await _read_body(request))
        if job.streaming:
            return await _send_events(request, service.frames(job))
        return await _send_whole(request, await service.answer(job))


async def _read_body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            return await request.read()
    except TimeoutError:
        raise RequestError(
            f"the request body did not arrive within {BODY_DEADLINE_S:.0f} s", status=408
        ) from None


async def _send_whole(request: web.Request, body: bytes) -> web.StreamResponse:
    # Written here and not by aiohttp after the handler, so that draining waits for the last byte.
    response = web.Response(body=body, content_type="application/json")
    with contextlib.suppress(ConnectionError):
        await response.prepare(request)
        await _before_write_deadline(request, response.write_eof())
    return response


async def _send_events(request: web.Request, frames: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would hold the tokens back
        }
    )
    async with contextlib.aclosing(frames):
        # A client that leaves is no error: closing `frames` aborts its generation.
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            async for frame in frames:
                await _write(request, response, frame)
            await response.write_eof()
    return response


async def _write(request: web.Request, response: web.StreamResponse, frame: bytes) -> None:
    transport = request.transport
    if transport is not None and not transport.get_write_buffer_size():
        await response.write(frame)  # cannot wait: nothing is queued before it
    else:
        await _before_write_deadline(request, response.write(frame))


async def _before_write_deadline(request: web.Request, write: Coroutine[Any, Any, None]) -> None:
    try:
        async with asyncio.timeout(WRITE_DEADLINE_S):
            await write
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read its answer") from None
