"""The rest of a stream whose connection, or frontend, has ended.

A stream that was begun with `X-Resumable-Stream: true` goes on for the grace; its events have ids. The client
gets the events after the last one that it has, whose id it sends in `Last-Event-ID`:

    GET /v1/streams/{id}
    POST as before              the same body to the same route
"""

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import NamedTuple

from aiohttp import web

from frontend.api.generation.caller import Caller
from frontend.api.generation.endpoint import Endpoint
from frontend.api.generation.resumable_events import Position, ResumeForm, read_form
from frontend.engine_client.streams import Deadline
from frontend.errors import RequestError
from frontend.http.event_stream import STREAM_ID, EventStream
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
from frontend.routes.access import TENANT
from frontend.routes.bodies import open_body

__all__ = ["LAST_EVENT_ID", "Asked", "resume", "resume_posted", "routes"]

LAST_EVENT_ID = "Last-Event-ID"
_KEY = re.compile(r"[A-Za-z0-9_]{1,64}", re.ASCII)

routes = web.RouteTableDef()


class Asked(NamedTuple):
    """What a client asks for."""

    key: str
    position: Callable[[int], Position]
    """The events that it has; gets the number of sequences. Raises RequestError."""
    check: Callable[[ResumeForm], None] = lambda form: None
    """Raises RequestError if the stream is not the one that it means."""


@routes.get("/v1/streams/{id}", allow_head=False)  # its headers alone would take the stream from its client
async def get_stream(request: web.Request) -> web.StreamResponse:
    """The events of a stream after the one in `Last-Event-ID`, or all."""
    key = request.match_info["id"]
    event_id = request.headers.get(LAST_EVENT_ID)
    return await resume(request, Asked(key, lambda count: Position.parse(event_id, key, count)))


async def resume_posted(request: web.Request, endpoint: Endpoint, event_id: str) -> web.StreamResponse:
    """Go on with a stream that was begun by the same body on the same route."""
    async with open_body(request) as body:

        def check(form: ResumeForm) -> None:
            if (form.endpoint, form.body) != (endpoint.id_prefix, body):
                raise RequestError(
                    f"'{LAST_EVENT_ID}' names a stream of another request: send the same body to the same "
                    "path again, or use GET /v1/streams/{id}",
                    param=LAST_EVENT_ID,
                )

        key = event_id.rpartition("/")[0]
        return await resume(request, Asked(key, lambda count: Position.parse(event_id, key, count), check))


async def resume(request: web.Request, asked: Asked) -> web.StreamResponse:
    """Send the rest of a stream. Raises RequestError: 404 for an unknown one."""
    if not _KEY.fullmatch(asked.key):
        raise RequestError(f"{asked.key!r:.80} is no id of a stream: see the header {STREAM_ID}", param="id")
    try:
        with request.app[LIFECYCLE].admit():
            return await _resume(request, asked)
    except asyncio.CancelledError:
        request.app[METRICS].disconnects += 1
        raise


async def _resume(request: web.Request, asked: Asked) -> web.StreamResponse:
    client = request.app[CLIENT]
    generation = request.app[GENERATION]
    with request.app[LIFECYCLE].interruptible():
        resumed = await client.resumption.resume(asked.key, request[TENANT])
    try:
        resumable = resumed.resumable
        assert resumable is not None  # `resume` gives no unknown one
        form = read_form(resumable.form)
        asked.check(form)
        after = asked.position(resumable.num_sequences)
        with request.app[LIFECYCLE].interruptible():
            caller = Caller(request[TENANT])
            preparer = request.app[PREPARER]
            generate = await preparer.restore(_endpoint(request, form), resumable, caller)
    except BaseException:
        client.resumption.keep(resumed)
        raise
    deadline = None
    if generate.timeout_s is not None:
        deadline = Deadline(generate.timeout_s, generate.started + generate.timeout_s)
    renderer = generate.renderer()
    async with client.open_resumed(resumed, deadline) as stream:
        events = EventStream(request, renderer.error, {STREAM_ID: asked.key})
        rest = generation.resumable_events(generate, renderer, stream, after)
        async with contextlib.aclosing(rest) as frames:
            return await events.send(frames)


def _endpoint(request: web.Request, form: ResumeForm) -> Endpoint:
    """The endpoint on which a stream was begun."""
    endpoints: list[Endpoint] = [request.app[key] for key in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)]
    return next(endpoint for endpoint in endpoints if endpoint.id_prefix == form.endpoint)
