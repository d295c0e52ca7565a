import asyncio
import json

from aiohttp import web

from atom.benchmarks.chaos.streams import ClientStream, follow_all


class BreakingServer:
    """Responds with two ids, and breaks connections off after so many events as `breaks` says."""

    def __init__(self, *breaks: int):
        self.requests: list[tuple[str, int]] = []
        """`Last-Event-ID`, and the seed, of each request."""
        self.at_once = 0
        self._breaks = [*breaks]
        self._open = 0

    async def completions(self, request: web.Request) -> web.StreamResponse:
        last = request.headers.get("Last-Event-ID", "")
        seed = (await request.json())["seed"]
        self.requests.append((last, seed))
        self._open += 1
        self.at_once = max(self.at_once, self._open)
        allowed = self._breaks.pop(0) if self._breaks else 9
        response = web.StreamResponse()
        await response.prepare(request)
        number = int(last or 0)
        while number < 2 and allowed:
            number += 1
            allowed -= 1
            data = json.dumps({"choices": [{"token_ids": [10 * seed + number]}]})
            await response.write(f"id: {number}\ndata: {data}\n\n".encode())
        self._open -= 1
        if not allowed and request.transport is not None:
            await asyncio.sleep(0.01)
            request.transport.abort()
            return response
        await response.write(b"id: 3\ndata: [DONE]\n\n")
        return response


def followed(server: BreakingServer, count: int = 1, each: int = 1) -> list[ClientStream]:
    async def run() -> list[ClientStream]:
        app = web.Application()
        app.router.add_post("/v1/completions", server.completions)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            bodies = [{"seed": seed} for seed in range(count)]
            return await follow_all(url, {}, bodies, lambda count: None, each)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_a_stream_that_breaks_is_resumed_after_its_last_event() -> None:
    server = BreakingServer(1)
    [stream] = followed(server)
    assert (stream.error, stream.ids, stream.resumptions) == ("", [1, 2], 1)
    assert server.requests == [("", 0), ("1", 0)]


def test_a_stream_that_breaks_before_its_first_event_is_sent_again() -> None:
    server = BreakingServer(0)
    [stream] = followed(server)
    assert (stream.error, stream.ids, stream.resumptions) == ("", [1, 2], 1)
    assert server.requests == [("", 0), ("", 0)]


def test_each_client_has_one_stream_at_a_time() -> None:
    server = BreakingServer()
    streams = followed(server, count=6, each=3)
    assert [stream.ids for stream in streams] == [[10 * seed + 1, 10 * seed + 2] for seed in range(6)]
    assert len(server.requests) == 6 and server.at_once <= 2
