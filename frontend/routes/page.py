"""The files of the status page: public, since they hold no data."""

import hashlib
from importlib.resources import files

from aiohttp import web
from aiohttp.typedefs import Handler

__all__ = ["FILE_ROUTE", "PAGE_ROUTE", "routes"]

PAGE_ROUTE = "/"
FILE_ROUTE = "/page/{name}"
_INDEX = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked for again with its ETag
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def routes() -> list[web.RouteDef]:
    """The page and its files, read now."""
    found = {
        entry.name: entry.read_bytes()
        for entry in (files("frontend") / "static").iterdir()
        if entry.is_file()
    }
    responses = {name: _handler(name, body) for name, body in found.items()}
    page = responses.pop(_INDEX)

    async def file(request: web.Request) -> web.StreamResponse:
        handler = responses.get(request.match_info["name"])
        if handler is None:
            raise web.HTTPNotFound
        return await handler(request)

    return [web.get(PAGE_ROUTE, page), web.get(FILE_ROUTE, file)]


def _handler(name: str, body: bytes) -> Handler:
    """Responds with one file, or with 304 to a client that has it."""
    etag = hashlib.sha256(body).hexdigest()[:32]
    headers = _HEADERS | {"ETag": f'"{etag}"'}

    async def respond(request: web.Request) -> web.StreamResponse:
        known = request.if_none_match or ()
        if any(tag.value in (etag, "*") for tag in known):
            return web.Response(status=304, headers=headers)
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=body, headers=headers | {"Content-Type": kind})

    return respond
