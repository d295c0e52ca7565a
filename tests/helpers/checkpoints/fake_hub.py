"""A hub on a loopback port: as much of its HTTP interface as fetching a model takes."""

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType

from aiohttp import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"
DEADLINE_S = 60.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeHub:
    """Serves `files` as the model `name`, in a thread, while the block runs.

    `trouble` is the X-Error-Code of every response, with status 401, 403 or 404, unless the client
    sends the token.
    """

    def __init__(self, name: str, files: dict[str, bytes], trouble: str = ""):
        self.url = ""
        self.breaks_off = False
        """Close the connection in the middle of every file."""
        self.fetched: Counter[str] = Counter()
        """How often the content of each file was sent."""
        self._name = name
        self._files = files
        self._trouble = trouble
        self._started, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        assert self._started.wait(DEADLINE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(f"/api/models/{self._name}/revision/{{revision}}", self._info)
        app.router.add_get(f"/api/models/{self._name}/tree/{{revision}}", self._tree)
        app.router.add_get(f"/{self._name}/resolve/{{revision}}/{{path:.+}}", self._file)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{port}"
        self._started.set()
        while not self._stop.is_set():
            await asyncio.sleep(0.01)
        await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        known = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        if self._trouble and not known:
            return _refusal(403 if self._trouble == "GatedRepo" else 401, self._trouble)
        if self._name not in request.path:
            return _refusal(404, "RepoNotFound")
        if request.match_info.get("revision") not in ("main", COMMIT):
            return _refusal(404, "RevisionNotFound")
        return await handler(request)

    async def _info(self, request: web.Request) -> web.Response:
        siblings = [{"rfilename": path} for path in self._files]
        return web.json_response({"id": self._name, "sha": COMMIT, "siblings": siblings})

    async def _tree(self, request: web.Request) -> web.Response:
        entries = [
            {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
            for path, data in self._files.items()
        ]
        return web.json_response(entries)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        if path not in self._files:
            return _refusal(404, "EntryNotFound")
        data = self._files[path]
        if request.method == "GET":
            self.fetched[path] += 1
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT}
        if self.breaks_off and request.method == "GET":
            return await _cut_off(request, data, headers)
        return web.Response(body=data, headers=headers)


async def _cut_off(request: web.Request, data: bytes, headers: dict[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(headers=headers | {"Content-Length": str(len(data))})
    await response.prepare(request)
    await response.write(data[: len(data) // 2])
    assert request.transport is not None
    request.transport.abort()
    return response


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _refusal(status: int, code: str) -> web.Response:
    return web.json_response({"error": code}, status=status, headers={"X-Error-Code": code})
