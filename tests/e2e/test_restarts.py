"""Processes that are killed under load come back: an engine's streams go on, a frontend's are cut off."""

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.helpers.servers import random_server
from tests.helpers.servers.edges import metrics_text
from tests.helpers.servers.random_server import ARGS, MODEL_NAME, Crowd, abort_all
from tests.helpers.servers.server import Server, running_server

pytestmark = [pytest.mark.timeout(480), pytest.mark.usefixtures("shared_memory_is_left_as_it_was")]

STREAMS = 6
DEADLINE_S = 120.0


def pids_of(server: Server, module: str) -> list[int]:
    return [pid for pid, line in server.children().items() if module in line]


def counter(server: Server, name: str) -> list[int]:
    """Its values over all labels."""
    pattern = rf"^atom:{name}_total\{{.*\}} (\S+)$"
    return [int(float(value)) for value in re.findall(pattern, metrics_text(server), re.MULTILINE)]


async def status_of_ready(server: Server) -> int:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session, session.get("/ready") as found:
        return found.status


async def until_ready(server: Server) -> float:
    """Seconds until /ready is 200."""
    begun = time.monotonic()
    async with asyncio.timeout(DEADLINE_S):
        while await status_of_ready(server) != 200:
            await asyncio.sleep(0.05)
    return time.monotonic() - begun


async def until_all_up(server: Server, engines: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            up = await asyncio.to_thread(metrics_text, server)
            if len(re.findall(r"^atom:engine_up.* 1\.0$", up, re.MULTILINE)) == engines:
                return
            await asyncio.sleep(0.05)


async def until_both_accept(server: Server) -> None:
    """The first of two frontends accepts for the other one until that is ready."""
    frontends = [psutil.Process(pid) for pid in pids_of(server, "frontend.main")]
    port = int(server.url.rpartition(":")[2])

    def count(frontend: psutil.Process) -> int:
        open_ones = frontend.net_connections("tcp4")
        return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in open_ones)

    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as session:
                responses = await asyncio.gather(*(session.get("/health") for _ in range(24)))
                counts = [count(frontend) for frontend in frontends]
                for response in responses:
                    response.release()
            if min(counts) > 3:
                return
            await asyncio.sleep(0.1)


async def complete(server: Server, **fields: object) -> str:
    """The text of a short response."""
    body = {"model": MODEL_NAME, "prompt": "once upon", "max_tokens": 8, "temperature": 0, **fields}
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with (
        aiohttp.ClientSession(server.url, timeout=timeout) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        text: str = (await response.json())["choices"][0]["text"]
    return text


def lives_in(directory: Path) -> list[str]:
    """What a server's directory has of its domains."""
    (run,) = directory.iterdir()
    return sorted(path.name for path in run.iterdir() if path.is_dir())


def is_shorter(crowd: Crowd, other: Crowd) -> bool:
    """No text of it is longer than that of the other one."""
    return all(len(text) <= len(other.texts[number]) for number, text in crowd.texts.items())


@pytest.mark.parametrize(
    ("victims", "args", "causes"),
    [
        (
            ("workers.main", "engine_core.process"),
            (),
            ("worker 0: killed by SIGKILL", "core: killed by SIGKILL"),
        ),
        (("workers.main",), ("-tp", "2"), ("worker [01]: killed by SIGKILL",)),
    ],
    ids=["worker, then core", "worker of two"],
)
def test_an_engine_that_dies_is_restarted(
    model: str,
    run_directories: Path,
    tmp_path: Path,
    victims: tuple[str, ...],
    args: tuple[str, ...],
    causes: tuple[str, ...],
) -> None:
    """Its streams get the text of an undisturbed run."""
    undisturbed, *crowds = (Crowd(STREAMS, temperature=0.8, seed=5) for _ in ("none", *victims))
    admin = tmp_path / "admin"

    async def kill(server: Server, victim: str, crowd: Crowd, before: str) -> float:
        """Seconds until the death is noticed. For how long it is not ready then may be too short to see."""

        def told(what: str) -> int:
            return server.text().count(what)

        deaths, starts = told(", has ended: "), told(", is ready after ")
        others = set(server.children()) - set(pids_of(server, "frontend.main"))
        async with crowd.streaming(server):
            os.kill(pids_of(server, victim)[0], signal.SIGKILL)
            killed = time.monotonic()
            await crowd.until(lambda: told(", has ended: ") > deaths)
            noticed = time.monotonic() - killed
            await crowd.until(lambda: told(", is ready after ") > starts)
            await until_ready(server)
            await crowd.go_on()
            await abort_all(admin)
        assert await complete(server) == before
        assert not others & set(server.children()), "a process of the dead engine lives"
        return noticed

    async def drive(server: Server) -> list[float]:
        before = await complete(server)
        noticed = [
            await kill(server, victim, crowd, before) for victim, crowd in zip(victims, crowds, strict=True)
        ]
        async with undisturbed.streaming(server):
            await undisturbed.until(lambda: all(is_shorter(crowd, undisturbed) for crowd in crowds))
            await abort_all(admin)
        return noticed

    with running_server("--model", model, *ARGS, *args, "--admin-socket", str(admin)) as server:
        noticed = asyncio.run(drive(server))
        assert counter(server, "engine_restarts") == [len(victims)]
        assert counter(server, "request_replays") == [STREAMS * len(victims)]
        assert lives_in(run_directories) == [f"engine-0.{len(victims)}", "frontend-0.0"]
        assert server.terminate() == 0
        text = server.text()
    assert max(noticed) < 20
    assert undisturbed.ends == {"finished": STREAMS}
    for life, (crowd, cause) in enumerate(zip(crowds, causes, strict=True)):
        assert crowd.ends == undisturbed.ends
        for number, got in crowd.texts.items():
            # Aborted amid a character, a text ends with a replacement of its bytes.
            assert undisturbed.texts[number].startswith(got.rstrip("\N{REPLACEMENT CHARACTER}"))
        assert re.search(f"engine, life {life}, has ended: {cause}; life {life + 1} starts in [12] s", text)
        assert re.search(rf"engine, life {life + 1}, is ready after \d", text)
    assert list(run_directories.iterdir()) == []


def test_without_replays_the_streams_of_a_dead_engine_fail(model: str) -> None:
    crowd = Crowd(STREAMS)

    async def drive(server: Server) -> None:
        async with crowd.streaming(server):
            os.kill(pids_of(server, "workers.main")[0], signal.SIGKILL)
        await until_ready(server)

    with running_server("--model", model, *ARGS, "--max-replays", "0") as server:
        asyncio.run(drive(server))
        assert server.terminate() == 0
    assert crowd.ends == {"error event": STREAMS}
    assert crowd.messages == {"the engine is gone: worker 0: killed by SIGKILL"}


def test_a_frontend_that_dies_is_restarted_and_no_connection_is_refused(
    model: str, run_directories: Path
) -> None:
    crowd = Crowd(STREAMS)

    async def drive(server: Server) -> None:
        async with crowd.streaming(server):
            os.kill(pids_of(server, "frontend.main")[0], signal.SIGKILL)
            assert await complete(server)  # it waits in the socket that the supervisor holds
        assert await complete(server)

    with running_server("--model", model, *ARGS) as server:
        asyncio.run(drive(server))
        assert counter(server, "frontend_restarts") == [1]
        assert lives_in(run_directories) == ["engine-0.0", "frontend-0.1"]
        assert server.terminate() == 0
    assert crowd.ends == {"cut off": STREAMS}
    assert list(run_directories.iterdir()) == []


def test_of_two_engines_the_other_serves_on(model: str, run_directories: Path, tmp_path: Path) -> None:
    """Streams of the dead one go on there, or at its next life where the client chose its rank."""
    moving, bound, staying = Crowd(4), Crowd(3, data_parallel_rank=0), Crowd(3, data_parallel_rank=1)
    admin, statuses = tmp_path / "admin", set()

    async def drive(server: Server) -> None:
        await until_all_up(server, 2)
        async with staying.streaming(server), bound.streaming(server), moving.streaming(server):
            os.kill(pids_of(server, "workers.main")[0], signal.SIGKILL)
            for _ in range(20):
                statuses.add(await status_of_ready(server))
                assert await complete(server)
            await until_all_up(server, 2)
            for crowd in (staying, bound, moving):
                await crowd.go_on()
            await abort_all(admin)
        texts = [await complete(server, data_parallel_rank=rank) for rank in (0, 1)]
        assert texts[0] == texts[1]

    with running_server("--model", model, *ARGS, "-dp", "2", "--admin-socket", str(admin)) as server:
        asyncio.run(drive(server))
        assert counter(server, "engine_restarts") == [1, 0]
        assert lives_in(run_directories) == ["engine-0.1", "engine-1.0", "frontend-0.0"]
        assert server.terminate() == 0
    assert statuses == {200}
    assert bound.ends == staying.ends == {"finished": 3} and moving.ends == {"finished": 4}


def test_of_two_frontends_the_other_serves_on(model: str, run_directories: Path, tmp_path: Path) -> None:
    """Each of them has some of the streams: but once in millions, all connections go to one socket."""
    crowd, admin = Crowd(24), tmp_path / "admin"

    async def drive(server: Server) -> None:
        await until_both_accept(server)
        async with crowd.streaming(server):
            os.kill(pids_of(server, "frontend.main")[0], signal.SIGKILL)
            await crowd.until(lambda: bool(crowd.ends))
            await crowd.go_on()
            await abort_all(admin)

    arguments = (*ARGS, "--api-server-count", "2", "--admin-socket", str(admin))
    with running_server("--model", model, *arguments) as server:
        asyncio.run(drive(server))
        assert crowd.ends.keys() == {"finished", "cut off"} and crowd.ends.total() == 24
        asyncio.run(complete(server))
        deadline = time.monotonic() + DEADLINE_S
        while "frontend 0, life 1, is ready" not in server.text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert server.terminate() == 0
    assert list(run_directories.iterdir()) == []


def test_a_frontend_drains_longer_than_the_other(model: str, run_directories: Path) -> None:
    """It answers the connections of the one that has ended, and ends as well as that one."""
    body = {"model": MODEL_NAME, "prompt": "one", "max_tokens": 30000, "ignore_eos": True, "stream": True}

    async def drive(server: Server) -> None:
        await until_both_accept(server)
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            asyncio.timeout(DEADLINE_S),
            aiohttp.ClientSession(server.url, connector=connector) as session,
            session.post("/v1/completions", json=body) as stream,
        ):
            await stream.content.readline()
            server.process.terminate()
            while len(pids_of(server, "frontend.main")) == 2:
                await asyncio.sleep(0.01)
            for _ in range(8):
                async with session.get("/ready") as response:
                    assert response.status == 503

    with running_server("--model", model, *ARGS, "--api-server-count", "2") as server:
        asyncio.run(drive(server))
        assert server.process.wait(DEADLINE_S) == 0
        assert "Traceback" not in server.text()
    assert list(run_directories.iterdir()) == []


def test_two_frontends_drain_together(model: str, run_directories: Path) -> None:
    crowd = Crowd(12, max_tokens=400)

    async def drive(server: Server) -> None:
        async with crowd.streaming(server):
            server.process.terminate()

    with running_server("--model", model, *ARGS, "--api-server-count", "2", "-dp", "2") as server:
        asyncio.run(drive(server))
        assert server.process.wait(DEADLINE_S) == 0, server.text()
    assert crowd.ends == {"finished": 12}
    assert list(run_directories.iterdir()) == []


@pytest.mark.slow
def test_with_two_frontends_a_request_that_ends_engines_fails_alone(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is killed at each token of one request, until that fails; the others are on both frontends."""
    monkeypatch.setattr(random_server, "_CLIENT_DEADLINE_S", 200.0)
    crowd, poison = Crowd(9, max_tokens=2000), Crowd(1, max_tokens=1000)

    async def drive(server: Server) -> int:
        async with crowd.streaming(server), poison.streaming(server):
            killed = set[int]()
            length = 0
            while not poison.ends:
                if len(poison.texts[0]) > length:
                    length = len(poison.texts[0])
                    for pid in set(pids_of(server, "workers.main")) - killed:
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)
                await asyncio.sleep(0.005)
        return len(killed)

    with running_server("--model", model, *ARGS, "--api-server-count", "2") as server:
        num_killed = asyncio.run(drive(server))
    assert poison.ends == {"error event": 1}
    assert crowd.ends == {"finished": 9}
    assert num_killed <= 7


KINDS: dict[str, dict[str, object]] = {
    "two sequences": {"n": 2, "temperature": 1.0},
    "log probabilities": {"logprobs": 3, "temperature": 0.7},
    "log probabilities of the prompt": {"logprobs": 1, "echo": True},
    "stop strings": {"stop": ["zz", "qqq"], "temperature": 1.2},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "fewest tokens": {"min_tokens": 580, "ignore_eos": False},
    "bias": {"logit_bias": {"20": 3, "21": -3}, "temperature": 0.9},
    "regex": {"structured_outputs": {"regex": "([a-c]{3}-){200}"}, "temperature": 1.0, "ignore_eos": False},
    "long prompt": {"prompt": "number " * 300},
}


_WITHOUT_DELAYS = (
    "from atom.supervisor import failure; failure.MAX_DELAY_S = 0.1; import atom.launch; atom.launch.main()"
)
"""Runs a server that starts an engine again at once, however often it was killed."""
_TRIES = 5
"""On a busy machine the requests may end while this test waits to kill their worker."""
DRAFTS = ("--method", "ngram", "--num-speculative-tokens", "3", "--prompt-lookup-min", "1")


@pytest.mark.parametrize("flags", [(), pytest.param(DRAFTS, marks=pytest.mark.slow)], ids=["plain", "drafts"])
def test_requests_of_every_kind_go_on(model: str, flags: tuple[str, ...]) -> None:
    """With the texts, tokens and finish reasons of an undisturbed run."""
    common = {"model": MODEL_NAME, "prompt": "once upon", "max_tokens": 600, "temperature": 0, "seed": 3}
    bodies = [common | {"ignore_eos": True} | fields for fields in KINDS.values()]

    def found(choice: dict[str, Any]) -> tuple[object, ...]:
        logprobs = choice["logprobs"] or {}
        return choice["index"], choice["text"], choice["finish_reason"], logprobs.get("tokens")

    async def ask(session: aiohttp.ClientSession, body: dict[str, object]) -> list[tuple[object, ...]]:
        async with session.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return [found(choice) for choice in (await response.json())["choices"]]

    async def run(server: Server, kill: bool) -> list[list[tuple[object, ...]]]:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
            before = sum(await asyncio.to_thread(counter, server, "generation_tokens"))
            work = asyncio.gather(*(ask(session, body) for body in bodies))
            if kill:
                while sum(await asyncio.to_thread(counter, server, "generation_tokens")) < before + 300:
                    await asyncio.sleep(0.01)
                os.kill(pids_of(server, "workers.main")[0], signal.SIGKILL)
            return await work

    with running_server("--model", model, *ARGS, *flags) as server:
        undisturbed = asyncio.run(run(server, kill=False))
        for _ in range(_TRIES):
            before = sum(counter(server, "request_replays"))
            replayed = asyncio.run(run(server, kill=True))
            for kind, expected, got in zip(KINDS, undisturbed, replayed, strict=True):
                assert got == expected, kind
            if sum(counter(server, "request_replays")) - before > len(KINDS) // 2:
                break
        else:
            pytest.fail("most requests had ended before each kill")
        assert server.terminate() == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_structured_stream_with_drafts_survives_a_kill_at_every_token(model: str, method: str) -> None:
    drafts = DRAFTS
    if method == "draft_model":
        drafts = ("--method", method, "--num-speculative-tokens", "3", "--draft-model", model)
        drafts += ("--no-spec-decode-adaptive",)  # it is as slow as the model
    body = {
        "model": MODEL_NAME,
        "prompt": "once upon",
        "max_tokens": 40,
        "temperature": 1.0,
        "seed": 3,
        "structured_outputs": {"regex": "([ab]{2}-){6}"},
        "stream": True,
    }

    async def stream(server: Server, kill: bool) -> tuple[str, int]:
        """The text, and how many workers were killed: one whenever there is more of it."""
        timeout = aiohttp.ClientTimeout(total=1000)
        text = ""
        killed = set[int]()
        async with (
            aiohttp.ClientSession(server.url, timeout=timeout) as session,
            session.post("/v1/completions", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
                for pid in set(pids_of(server, "workers.main")) - killed if kill else ():
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        return text, len(killed)

    limits = ("--max-replays", "100", "--max-restarts", "100")
    program = ("-c", _WITHOUT_DELAYS)
    with running_server("--model", model, *ARGS, *drafts, *limits, program=program) as server:
        undisturbed, _ = asyncio.run(stream(server, kill=False))
        text, num_killed = asyncio.run(stream(server, kill=True))
        assert server.terminate() == 0
    assert re.fullmatch("([ab]{2}-){6}", text)
    assert text == undisturbed
    assert num_killed >= 5
