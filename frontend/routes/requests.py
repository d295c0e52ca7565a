"""Requests that run, or have ended lately, for clients with the API key that sent them.

GET  /v1/requests/{id}         where the time of a request went, and what it had of the prefix cache
POST /v1/requests/{id}/abort   end it
"""

from aiohttp import web

from frontend.api.generation.request_info import report
from frontend.api.schemas.request_info import AbortReport
from frontend.errors import RequestError
from frontend.http.json_response import json_response
from frontend.keys import CLIENT
from frontend.routes.access import TENANT
from frontend.routes.bodies import check_no_fields

__all__ = ["routes"]

_MAX_ID = 256

routes = web.RouteTableDef()


@routes.get("/v1/requests/{id}")
async def show_request(request: web.Request) -> web.Response:
    """A request that runs or has ended lately, sent with the same API key."""
    name = _name(request)
    answers = await request.app[CLIENT].control.requests(name)
    return json_response(report(name, answers, request[TENANT]))


@routes.post("/v1/requests/{id}/abort")
async def abort_request(request: web.Request) -> web.Response:
    """End a request that was sent with the same API key; its client gets what was generated.

    Web pages from other origins are refused: without API keys, any page could end the requests of others.
    """
    name = _name(request)
    if _is_cross_origin(request):
        text = "web pages of other origins cannot abort requests: close the connection of your own instead"
        raise RequestError(text, status=403, code="cross_origin")
    await check_no_fields(request)
    count = await request.app[CLIENT].abort_named([name], tenant=request[TENANT])
    if not count:
        text = f"no request {name!r:.100} is running: it has ended, or was sent with another API key"
        raise RequestError(text, param="id", status=404)
    return json_response(AbortReport(id=name, aborted_sequences=count))


def _name(request: web.Request) -> str:
    """The id in the path. Raises RequestError for one that is too long."""
    name = request.match_info["id"]
    if len(name) > _MAX_ID:
        raise RequestError(f"an id has at most {_MAX_ID} characters", param="id")
    return name


def _is_cross_origin(request: web.Request) -> bool:
    """Whether a page of another origin sends the request. Browsers send the first header over TLS alone."""
    headers = request.headers
    if "Sec-Fetch-Site" in headers:
        return headers["Sec-Fetch-Site"] not in ("same-origin", "none")
    return "Origin" in headers and headers["Origin"].partition("://")[2] != headers.get("Host")
