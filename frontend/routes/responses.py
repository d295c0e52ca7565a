"""GET and DELETE /v1/responses/{id}, and its input_items: the stored responses."""

import asyncio
import re

from aiohttp import web

from frontend.api.generation.resumable_events import Position
from frontend.api.responses.input_items import INCLUDED, Page, input_items
from frontend.errors import RequestError
from frontend.http.json_response import encoded_response, json_response
from frontend.keys import RESPONSE_STORE
from frontend.routes.access import TENANT
from frontend.routes.streams import Asked, resume

__all__ = ["routes"]

_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_PATH = "/v1/responses/{id}"

routes = web.RouteTableDef()


@routes.get(_PATH, allow_head=False)
async def get_response(request: web.Request) -> web.StreamResponse:
    """A stored response, complete; or with `stream` the rest of one that was begun as a resumable stream."""
    if _is_stream(request):
        after = _starting_after(request)
        return await resume(request, Asked(request.match_info["id"], lambda _: Position((after + 1,))))
    stored = request.app[RESPONSE_STORE].get(request[TENANT], request.match_info["id"])
    return encoded_response(stored.body)


def _is_stream(request: web.Request) -> bool:
    """Whether events are asked for. Raises RequestError for a parameter without effect."""
    for name in request.query:
        if name not in ("stream", "starting_after", *INCLUDED):
            raise RequestError(
                f"unknown parameter {name!r:.80}: there are 'stream', 'starting_after' and 'include'",
                param=name,
            )
    stream = request.query.get("stream", "false")
    if stream not in ("true", "false"):
        raise RequestError(f"'stream' must be 'true' or 'false', not {stream!r:.80}", param="stream")
    if stream == "false" and "starting_after" in request.query:
        raise RequestError(
            "'starting_after' needs 'stream=true': without it the whole response is returned",
            param="starting_after",
        )
    return stream == "true"


def _starting_after(request: web.Request) -> int:
    """The last `sequence_number` that the client has; -1 without any. Raises RequestError."""
    given = request.query.get("starting_after")
    if given is None:
        return -1
    if not _NUMBER.fullmatch(given):
        raise RequestError(
            f"'starting_after' must be the sequence_number of an event, not {given!r:.80}",
            param="starting_after",
        )
    return int(given)


@routes.get(_PATH + "/input_items")
async def get_input_items(request: web.Request) -> web.Response:
    """What a stored response was made from."""
    page = Page.parse(request.query)
    response_id = request.match_info["id"]
    stored = request.app[RESPONSE_STORE].get(request[TENANT], response_id)
    return encoded_response(await asyncio.to_thread(input_items, response_id, stored, page))


@routes.delete(_PATH)
async def delete_response(request: web.Request) -> web.Response:
    """Delete a stored response."""
    response_id = request.match_info["id"]
    request.app[RESPONSE_STORE].delete(request[TENANT], response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@routes.post(_PATH + "/cancel")
async def cancel_response(request: web.Request) -> web.Response:
    """Refused: only background responses can be cancelled, and there are none."""
    raise RequestError(
        "only responses with 'background' can be cancelled, and this server has none: "
        "close the connection of a request to abort it",
        code="unsupported_parameter",
    )
