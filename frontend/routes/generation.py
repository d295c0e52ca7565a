"""POST /v1/chat/completions and /v1/completions: JSON or server-sent events."""

import asyncio
import contextlib
from typing import Any

from aiohttp import web

from frontend.admission import AdmissionSlot
from frontend.keys import CHAT, CLIENT, COMPLETIONS, LIFECYCLE, METRICS
from frontend.routes.access import TENANT
from frontend.routes.bodies import read_body
from frontend.routes.errors import client_request_id
from frontend.routes.writing import EventStream, send_json
from frontend.serving.caller import Caller
from frontend.serving.generation import GenerationService

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Chat completions."""
    return await _generate(request, request.app[CHAT])


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """Text completions."""
    return await _generate(request, request.app[COMPLETIONS])


async def _generate(request: web.Request, service: GenerationService[Any]) -> web.StreamResponse:
    client = request.app[CLIENT]
    try:
        with request.app[LIFECYCLE].admit():
            client.check_ready()
            client.admission.check()  # a full server reads no bodies
            body = await read_body(request)
            with client.admission.slot() as slot:
                return await _respond(request, service, body, slot)
    except asyncio.CancelledError:
        request.app[METRICS].disconnects += 1
        raise


async def _respond(
    request: web.Request, service: GenerationService[Any], body: bytes, slot: AdmissionSlot
) -> web.StreamResponse:
    job = await service.prepare(body, Caller(request[TENANT], client_request_id(request)))
    slot.reserve(job.request_ids)
    if not job.streaming:
        return await send_json(request, await service.answer(job))
    # Closing `frames` aborts the generation.
    async with contextlib.aclosing(service.frames(job)) as frames:
        return await EventStream(request).send(frames)
