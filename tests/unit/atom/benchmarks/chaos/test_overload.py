import asyncio
import json

import aiohttp
from aiohttp import web

from atom.benchmarks.chaos.overload import Load
from atom.benchmarks.chaos.report import OverloadFigures, judge_overload

NAME = ("overload", "R15", "ten times the requests that it can take")


class SmallServer:
    """Takes two requests at a time, and refuses the others; may compute tokens for those first."""

    def __init__(self, wastes: bool):
        self.tokens = 0
        self.running = 0
        self._wastes = wastes

    async def completions(self, request: web.Request) -> web.Response:
        tokens = (await request.json())["max_tokens"]
        if self.running >= 2:
            self.tokens += tokens if self._wastes else 0
            return web.Response(status=429, headers={"Retry-After": "1"})
        self.running += 1
        await asyncio.sleep(0.02)
        self.running -= 1
        self.tokens += tokens
        return web.Response(text=json.dumps({}))

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f'atom:generation_tokens_total{{engine="0"}} {self.tokens}.0\n')


def overloaded(wastes: bool) -> tuple[float, int, int, dict[str, int]]:
    async def run() -> tuple[float, int, int, dict[str, int]]:
        server = SmallServer(wastes)
        app = web.Application()
        app.router.add_post("/v1/completions", server.completions)
        app.router.add_get("/metrics", server.metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
                load = Load(session, "m")
                return *await load.open(rate=400, seconds=0.3), dict(load.outcomes)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_tokens_of_refused_requests_are_wasted() -> None:
    _, tokens, wasted, outcomes = overloaded(wastes=True)
    assert outcomes.keys() == {"200", "429"}
    assert wasted == 32 * outcomes["429"] and tokens == 32 * sum(outcomes.values())


def test_a_server_that_refuses_first_wastes_none() -> None:
    tokens_per_s, tokens, wasted, outcomes = overloaded(wastes=False)
    assert tokens_per_s > 0 and tokens == 32 * outcomes["200"] and wasted == 0


def test_waste_is_a_problem_at_any_speed() -> None:
    figures = OverloadFigures(
        peak=10, goodput=10, recovery_s=0.1, tokens=1000, wasted_tokens=20, in_progress_bytes=0
    )
    report = judge_overload(NAME, figures, {"200": 5, "429": 50}, grown_bytes=0)
    assert report.problems == ["20 of 1000 tokens were computed for requests that were not served"]
    assert "20 of 1000 tokens wasted" in report.text()
