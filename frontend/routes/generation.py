"""The routes that generate: JSON or server-sent events."""

import asyncio
import contextlib
import re

from aiohttp import web
from xxhash import xxh3_64_intdigest

from frontend.api.generation.caller import Caller
from frontend.api.generation.endpoint import Endpoint
from frontend.api.generation.resumable_events import RESUMABLE
from frontend.engine_client.admission import AdmissionSlot
from frontend.errors import RequestError
from frontend.http.event_stream import STREAM_ID, EventStream, send_json
from frontend.keys import (
    CHAT,
    CLIENT,
    COMPLETIONS,
    GENERATION,
    LIFECYCLE,
    MESSAGES,
    METRICS,
    PREPARER,
    RESPONSES,
)
from frontend.metrics.tracing import TraceContext
from frontend.routes.access import TENANT
from frontend.routes.bodies import open_body
from frontend.routes.errors import client_request_id
from frontend.routes.streams import LAST_EVENT_ID, resume_posted

__all__ = ["routes"]


_RANK_HEADER = "X-Data-Parallel-Rank"
_MAX_RANK_DIGITS = 9
_SESSION_HEADERS = ("X-Session-ID", "X-Dynamo-Session-ID", "X-Correlation-ID")
_TIMEOUT_HEADER = "X-Request-Timeout"
_SECONDS = re.compile(r"\d{1,6}(\.\d{1,6})?", re.ASCII)

routes = web.RouteTableDef()


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Chat completions."""
    return await _generate(request, request.app[CHAT])


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """Text completions."""
    return await _generate(request, request.app[COMPLETIONS])


@routes.post("/v1/responses")
async def responses(request: web.Request) -> web.StreamResponse:
    """OpenAI's responses."""
    return await _generate(request, request.app[RESPONSES])


@routes.post("/v1/messages")
async def messages(request: web.Request) -> web.StreamResponse:
    """Anthropic's messages."""
    return await _generate(request, request.app[MESSAGES])


async def _generate(request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
    client = request.app[CLIENT]
    if event_id := request.headers.get(LAST_EVENT_ID):
        return await resume_posted(request, endpoint, event_id)
    try:
        with request.app[LIFECYCLE].admit():
            client.check_ready()
            with client.admission.slot() as slot:  # before the body: a full server reads none
                return await _respond(request, endpoint, slot)
    except asyncio.CancelledError:
        request.app[METRICS].disconnects += 1
        raise


async def _respond(request: web.Request, endpoint: Endpoint, slot: AdmissionSlot) -> web.StreamResponse:
    generation = request.app[GENERATION]
    with request.app[LIFECYCLE].interruptible():
        async with open_body(request) as body:
            generate = await request.app[PREPARER].prepare(endpoint, body, _caller(request))
            del body
        slot.reserve(len(generate.request_ids))
        renderer = generate.renderer()
        response = None if generate.streaming else await generation.respond(generate, renderer, slot)
    if response is not None:
        with request.app[CLIENT].output_memory.sending(len(response.body)):
            return await send_json(request, response.body, {"Server-Timing": response.server_timing})
    if generate.resume_key:
        events = EventStream(request, renderer.error, {STREAM_ID: generate.resume_key})
        # Closing it leaves the generation to a client that resumes it.
        async with contextlib.aclosing(generation.stream_resumable(generate, renderer, slot)) as frames:
            return await events.send(frames)
    # Closing `frames` aborts the generation.
    events = EventStream(request, renderer.error)
    async with contextlib.aclosing(generation.stream(generate, renderer, events, slot)) as frames:
        return await events.send(frames)


def _caller(request: web.Request) -> Caller:
    """Raises RequestError for an invalid header."""
    parent = request.headers.get("traceparent")
    state = request.headers.get("tracestate", "")
    return Caller(
        tenant=request[TENANT],
        request_id=client_request_id(request),
        data_parallel_rank=_data_parallel_rank(request),
        timeout_s=_timeout(request),
        is_resumable=_is_resumable(request),
        session=_session(request),
        trace=None if parent is None else TraceContext(parent, state),
    )


def _data_parallel_rank(request: web.Request) -> int | None:
    """Raises RequestError for a header that is no number."""
    given = request.headers.get(_RANK_HEADER)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_RANK_DIGITS):
        raise RequestError(f"{_RANK_HEADER} must be the number of a rank, not {given!r}", param=_RANK_HEADER)
    return int(given)


def _session(request: web.Request) -> int:
    """The hash of the session that a header names, apart from those of other API keys; 0: none."""
    name = next((request.headers[each] for each in _SESSION_HEADERS if request.headers.get(each)), "")
    return xxh3_64_intdigest(f"{request[TENANT]}\0{name}".encode("utf-8", "surrogatepass")) if name else 0


def _is_resumable(request: web.Request) -> bool:
    """Raises RequestError for a header that is neither true nor false."""
    given = request.headers.get(RESUMABLE, "false")
    if given not in ("true", "false"):
        raise RequestError(f"{RESUMABLE} must be 'true' or 'false', not {given!r:.100}", param=RESUMABLE)
    return given == "true"


def _timeout(request: web.Request) -> float | None:
    """Raises RequestError for a header that is no number of seconds."""
    given = request.headers.get(_TIMEOUT_HEADER)
    if given is None:
        return None
    if not _SECONDS.fullmatch(given):
        raise RequestError(f"{_TIMEOUT_HEADER} must be seconds, not {given!r}", param=_TIMEOUT_HEADER)
    return float(given)
