"""GET /v1/streams/{id}: the rest of a stream whose connection, or frontend, has ended.

A stream that was begun with `X-Resumable-Stream: true` goes on for the grace; its events have ids. The client
that asks for it, with the last id that it has got in `Last-Event-ID`, gets the events after that one.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable

from aiohttp import web

from frontend.api.generation.caller import Caller
from frontend.api.generation.endpoint import Endpoint
from frontend.api.generation.resumption import Position, read_form
from frontend.engine_client.resumption import ResumedStream
from frontend.engine_client.streams import Deadline
from frontend.errors import RequestError
from frontend.http.event_stream import EventStream
from frontend.keys import CHAT, CLIENT, COMPLETIONS, GENERATION, LIFECYCLE, MESSAGES, METRICS, RESPONSES
from frontend.routes.access import TENANT
from frontend.routes.generation import STREAM_ID

__all__ = ["resume", "routes"]

_KEY = re.compile(r"[A-Za-z0-9_]{1,64}", re.ASCII)

PositionOf = Callable[[int], Position]

routes = web.RouteTableDef()


@routes.get("/v1/streams/{id}")
async def get_stream(request: web.Request) -> web.StreamResponse:
    """The events of a stream after the one in `Last-Event-ID`, or all."""
    key = request.match_info["id"]
    event_id = request.headers.get("Last-Event-ID")
    return await resume(request, key, lambda count: Position.parse(event_id, key, count))


async def resume(request: web.Request, key: str, position: PositionOf) -> web.StreamResponse:
    """Send the rest of the stream `key`; `position` gets the number of its sequences.

    Raises RequestError (404) for an unknown stream.
    """
    if not _KEY.fullmatch(key):
        raise RequestError(f"{key!r:.80} is no id of a stream: see the header {STREAM_ID}", param="id")
    try:
        with request.app[LIFECYCLE].admit():
            return await _resume(request, key, position)
    except asyncio.CancelledError:
        request.app[METRICS].disconnects += 1
        raise


async def _resume(request: web.Request, key: str, position: PositionOf) -> web.StreamResponse:
    client = request.app[CLIENT]
    generation = request.app[GENERATION]
    with request.app[LIFECYCLE].interruptible():
        resumed = await client.resumption.resume(key, request[TENANT])
    try:
        resumable = resumed.resumable
        assert resumable is not None  # `resume` gives no unknown one
        after = position(resumable.num_sequences)
        endpoint = _endpoint(request, resumed)
        with request.app[LIFECYCLE].interruptible():
            generate = await generation.restore(endpoint, resumable, Caller(request[TENANT]))
    except BaseException:
        client.resumption.keep(resumed)
        raise
    deadline = None
    if generate.timeout_s is not None:
        deadline = Deadline(generate.timeout_s, generate.started + generate.timeout_s)
    renderer = generate.renderer()
    async with client.open_resumed(resumed, deadline) as stream:
        events = EventStream(request, renderer.error, {STREAM_ID: key})
        rest = generation.resumable_events(generate, renderer, stream, after)
        async with contextlib.aclosing(rest) as frames:
            return await events.send(frames)


def _endpoint(request: web.Request, resumed: ResumedStream) -> Endpoint:
    """The endpoint on which a stream was begun."""
    assert resumed.resumable is not None
    prefix = read_form(resumed.resumable.form).endpoint
    endpoints: list[Endpoint] = [request.app[key] for key in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)]
    return next(endpoint for endpoint in endpoints if endpoint.id_prefix == prefix)
