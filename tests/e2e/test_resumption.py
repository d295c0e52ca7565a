"""Streams outlive their frontend: a client that asks again gets the rest, without a gap or a repeat."""

import asyncio
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from atom.examples.unbroken_stream import chunks
from tests.helpers.servers.edges import Gauges, metrics_text
from tests.helpers.servers.random_server import ARGS, ENDLESS, abort_all, write_tools_checkpoint
from tests.helpers.servers.resuming import OnEvent, Resumed, follow, read
from tests.helpers.servers.server import Server, running_server

pytestmark = pytest.mark.timeout(240)

_USER = {"role": "user", "content": "one two"}
_TEXT = {"model": "random", "stream": True, "seed": 3, "temperature": 0.8}
_CHAT = {**_TEXT, "messages": [_USER], "max_tokens": 1000}
_SCHEMA = {"type": "array", "minItems": 150, "maxItems": 160, "items": {"enum": ["x", "yz"]}}
_WEATHER = {"type": "object", "properties": {"cities": _SCHEMA}, "required": ["cities"]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**_TEXT, "prompt": "one two", "max_tokens": 1000, "ignore_eos": True}),
    (
        "/v1/completions",
        {**_TEXT, "prompt": ["one", "two"], "n": 2, "max_tokens": 1000, "ignore_eos": True, "stop": ["qz"]},
    ),
    ("/v1/chat/completions", {**_CHAT, "ignore_eos": True, "stream_options": {"include_usage": True}}),
    (
        "/v1/chat/completions",
        {
            **_CHAT,
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": _WEATHER}}],
            "tool_choice": "required",
        },
    ),
    (
        "/v1/chat/completions",
        {
            **_CHAT,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
        },
    ),
    ("/v1/responses", {**_TEXT, "input": "one two", "max_output_tokens": 1000, "ignore_eos": True}),
    (
        "/v1/messages",
        {"model": "random", "stream": True, "max_tokens": 1000, "temperature": 0, "messages": [_USER]},
    ),
]

_TRIES = 5
"""On a busy machine streams may end while this test waits to kill their frontend."""
# A busy machine may take long to start a frontend.
MORE = ("--api-server-count", "2", "--orphan-grace", "150")


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's administration socket."""
    return tmp_path_factory.mktemp("admin") / "socket"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, admin: Path) -> Iterator[Server]:
    small = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    directory = write_tools_checkpoint(tmp_path_factory.mktemp("model") / "model", **small)
    with running_server("--model", str(directory), *ARGS, *MORE, "--admin-socket", str(admin)) as running:
        asyncio.run(_all(running))  # fills the prefix cache, whose hits are part of the usage
        yield running


def kill_frontends(server: Server, place: int | None = None) -> None:
    """Kill all, or the one at this place in their order."""
    pids = [pid for pid, line in server.children().items() if "frontend.main" in line]
    for pid in pids if place is None else pids[place : place + 1]:
        os.kill(pid, signal.SIGKILL)


def kill_worker(server: Server) -> None:
    """Kill the only one."""
    os.kill(next(pid for pid, line in server.children().items() if "workers.main" in line), signal.SIGKILL)


def kill_core(server: Server) -> None:
    """Kill the only one, and so its worker."""
    pids = [pid for pid, line in server.children().items() if "engine_core.process" in line]
    os.kill(pids[0], signal.SIGKILL)


async def _all(server: Server, on_event: Any = lambda resumed: None) -> list[Resumed]:
    return await asyncio.gather(*(follow(server.url, path, body, on_event) for path, body in REQUESTS))


def test_streams_go_on_after_the_death_of_their_frontend(server: Server) -> None:
    """Seeded, with several sequences, tool calls and structured output, of every endpoint."""
    undisturbed = asyncio.run(_all(server))
    assert all(each.resumptions == 0 for each in undisturbed)
    chosen = random.Random(1)
    for _ in range(_TRIES):
        at = {chosen.randrange(15, 40)}

        def kill(resumed: Resumed, at: set[int] = at) -> None:
            if len(resumed.events) in at:
                at.clear()
                kill_frontends(server)

        resumed = asyncio.run(_all(server, kill))
        assert not at
        for (path, _), one, other in zip(REQUESTS, resumed, undisturbed, strict=True):
            assert one.texts == other.texts, path
            assert sorted(one.events) == sorted(other.events), path
        if sum(each.resumptions >= 1 for each in resumed) > len(resumed) // 2:  # a short one may have ended
            break
    else:
        pytest.fail("most streams had ended before each kill")


def test_the_example_with_the_openai_package_gives_the_whole_text(server: Server) -> None:
    """Only one frontend is killed, whichever serves it: the other one goes on at once."""
    body = {**_CHAT, "extra_body": {"ignore_eos": True}}
    del body["stream"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        expected = [_content(chunk) for chunk in client.chat.completions.create(**body, stream=True)]
        got = []
        for chunk in chunks(client, **body):
            got.append(_content(chunk))
            if len(got) in (20, 60):
                kill_frontends(server, len(got) // 40)
    assert "".join(got) == "".join(expected)


def _content(chunk: ChatCompletionChunk) -> str:
    return chunk.choices[0].delta.content or "" if chunk.choices else ""


@pytest.mark.slow
def test_frontends_die_again_and_again_at_random_tokens(server: Server) -> None:
    """One after another, each at a random event of the streams together."""
    undisturbed = asyncio.run(_all(server))
    chosen = random.Random(7)
    left = chosen.sample(range(20, 400), 4)
    seen = [0]

    def kill(resumed: Resumed) -> None:
        seen[0] += 1
        if seen[0] in left:
            kill_frontends(server, chosen.randrange(2))

    resumed = asyncio.run(_all(server, kill))
    assert sum(each.resumptions for each in resumed) >= 4
    for (path, _), one, other in zip(REQUESTS, resumed, undisturbed, strict=True):
        assert one.texts == other.texts, path
        assert sorted(one.events) == sorted(other.events), path


@pytest.mark.slow
def test_of_clients_that_want_one_stream_the_last_gets_all_of_it(server: Server) -> None:
    """They ask both frontends, a few at a time. The others get its beginning, and an error that says why."""
    path, body = REQUESTS[0]
    body = {**body, "max_tokens": 3000}
    expected = asyncio.run(follow(server.url, path, body)).events

    async def ask(key: str, number: int) -> list[str]:
        await asyncio.sleep(number // 4 * 0.03)
        resumed = Resumed(ids=[f"{key}/0"])
        await read(server.url, path, body, resumed)
        return resumed.events

    async def run() -> list[list[str]]:
        begun = Resumed()
        reading = asyncio.create_task(read(server.url, path, body, begun))
        while not begun.ids:
            await asyncio.sleep(0.01)
        key = begun.ids[0].partition("/")[0]
        found = await asyncio.gather(*(ask(key, number) for number in range(60)))
        await reading
        return [*found, begun.events]

    whole = 0
    for events in asyncio.run(run()):
        whole += events == expected
        if events != expected:
            *beginning, error, done = events
            assert beginning == expected[: len(beginning)]
            assert '"code":"stream_resumed"' in error and done == "[DONE]"
    assert whole == 1


_GRAMMAR = {"ignore_eos": False, "min_tokens": ENDLESS, "structured_outputs": {"regex": "([ab]{2}-)*"}}
_UNNOTED = 2000
"""More tokens than an engine samples between two of its reports."""


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("fields", [{}, _GRAMMAR], ids=["plain", "grammar"])
def test_an_engine_dies_while_its_orphans_wait_for_their_client(
    server: Server, admin: Path, fields: dict[str, Any]
) -> None:
    """Another frontend has kept them by then, and replays them.

    It has never compiled their grammar, and cannot send it to the next life before the client asks.
    """
    path, body = REQUESTS[0]
    body = {**body, "max_tokens": ENDLESS, **fields}

    async def read_and_end(resumed: Resumed, count: int) -> None:
        """Read so many events, then end the request."""
        ending: list[asyncio.Task[None]] = []

        def end(resumed: Resumed) -> None:
            if len(resumed.events) == count:
                ending.append(asyncio.create_task(abort_all(admin)))

        async with asyncio.timeout(200):
            while not await read(server.url, path, body, resumed, end):
                await asyncio.sleep(0.2)
            await asyncio.gather(*ending)

    async def run() -> tuple[list[str], list[str]]:
        before = Gauges(server)["generation_tokens_total"]
        resumed = await _kept_by_another(server, path, body)
        # Each event has a token at least: so many are more than those of the engine that dies.
        count = int(Gauges(server)["generation_tokens_total"] - before) + _UNNOTED
        replays = server.text().count("1 of 1 sequences run again")
        kill_worker(server)
        await read_and_end(resumed, count)
        async with asyncio.timeout(100):
            while server.text().count("1 of 1 sequences run again") != replays + 1:  # it had not ended
                await asyncio.sleep(0.05)
        await read_and_end(undisturbed := Resumed(), count)
        return resumed.events[:count], undisturbed.events[:count]

    events, expected = asyncio.run(run())
    assert events == expected


async def _kept_by_another(server: Server, path: str, body: dict[str, Any]) -> Resumed:
    """What a client has of a stream that waits for it at a frontend which has not begun it."""
    starts = server.text().count("is ready after")

    def strike(resumed: Resumed) -> None:
        if len(resumed.events) == 30:
            kill_frontends(server)

    resumed = Resumed()
    assert not await read(server.url, path, body, resumed, strike)
    async with asyncio.timeout(100):
        while server.text().count("is ready after") < starts + 2:
            await asyncio.sleep(0.2)
        await asyncio.sleep(3.5)  # a core offers orphans after three seconds
        while not re.search(r"^atom:orphans\{.* 0.0$", await _metrics(server), re.MULTILINE):
            await asyncio.sleep(0.5)
    return resumed


async def _metrics(server: Server) -> str:
    """Empty while no frontend answers."""
    try:
        return await asyncio.to_thread(metrics_text, server)
    except OSError:
        return ""


_LONG_LIST = {"type": "array", "minItems": 150, "maxItems": 160, "items": {"enum": ["x", "yz"]}}
LONG_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            **_CHAT,
            "max_tokens": 2000,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _LONG_LIST}},
        },
    ),
    ("/v1/completions", {**REQUESTS[1][1], "max_tokens": 300}),
]


@pytest.mark.slow
@pytest.mark.parametrize("engine_first", [True, False])
@pytest.mark.parametrize("between_s", [0.0, 1.0, 2.5])
def test_streams_go_on_after_the_deaths_of_their_frontend_and_engine(
    server: Server, engine_first: bool, between_s: float
) -> None:
    """All frontends die. Only they, and the engine, have the streams."""
    undisturbed = asyncio.run(_long(server))
    deaths = [lambda: kill_core(server), lambda: kill_frontends(server)]
    begun: list[Resumed] = []

    def strike(resumed: Resumed) -> None:
        if len(resumed.events) == 40:
            begun.append(resumed)
            if len(begun) == len(LONG_REQUESTS):
                first, second = deaths if engine_first else reversed(deaths)
                first()
                asyncio.get_running_loop().call_later(between_s, second)

    resumed = asyncio.run(_long(server, strike))
    for one, other in zip(resumed, undisturbed, strict=True):
        assert one.resumptions and one.texts == other.texts
        assert sorted(one.events) == sorted(other.events)
    assert re.search(r"^atom:orphans\{.* 0.0$", metrics_text(server), re.MULTILINE)


async def _long(server: Server, on_event: OnEvent = lambda resumed: None) -> list[Resumed]:
    """The second one begins with the first event of the first, whose grammar is compiled by then."""
    begun = asyncio.Event()

    def first(resumed: Resumed) -> None:
        begun.set()
        on_event(resumed)

    async def second() -> Resumed:
        await begun.wait()
        return await follow(server.url, *LONG_REQUESTS[1], on_event)

    return await asyncio.gather(follow(server.url, *LONG_REQUESTS[0], first), second())
