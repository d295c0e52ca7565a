"""A running server is replaced by another one: no request fails, and streams that can be resumed go on."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helpers.checkpoints.tiny_tokenizer import TEMPLATE
from tests.helpers.servers.random_server import ARGS, write_checkpoint
from tests.helpers.servers.resuming import Resumed, follow
from tests.helpers.servers.server import Server, is_alive, replaced, running_server

pytestmark = pytest.mark.timeout(600)

_PATH = "/v1/completions"
_PLAIN = {"model": "random", "prompt": "one two", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
_LONG = {
    "model": "random",
    "prompt": "one two three",
    "stream": True,
    "temperature": 0.8,
    "seed": 5,
    "max_tokens": 1500,
    "ignore_eos": True,
}
_MORE = ("--api-server-count", "2", "--orphan-grace", "150", "--shutdown-timeout", "3")


def checkpoint(directory: Path, **changes: Any) -> Path:
    found = write_checkpoint(directory, **changes)
    (found / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return found


class Load:
    """Clients of one URL, until `stop`: plain requests on open connections, and long streams."""

    def __init__(self, url: str, text: str, events: list[str]):
        """What an undisturbed server gave."""
        self.problems: list[str] = []
        self.requests = self.streams = self.resumptions = 0
        self._url = url
        self._text = text
        self._events = events
        self._stopped = False

    async def run(self, work: Any) -> None:
        """Until `work`, a coroutine, ends."""
        clients = [
            asyncio.create_task(each) for each in (self._plain(), self._plain(), self._long(), self._long())
        ]
        try:
            await work
        finally:
            self._stopped = True
            await asyncio.gather(*clients)

    async def _plain(self) -> None:
        async with aiohttp.ClientSession(self._url) as session:
            while not self._stopped:
                try:
                    if (text := await plain(session)) != self._text:
                        self.problems.append(f"another text: {text}")
                except (aiohttp.ClientError, AssertionError) as error:
                    self.problems.append(repr(error))
                self.requests += 1

    async def _long(self) -> None:
        while not self._stopped:
            try:
                resumed = await follow(self._url, _PATH, _LONG)
            except (aiohttp.ClientError, AssertionError, TimeoutError) as error:
                self.problems.append(f"a stream: {error!r}")
                return
            if resumed.events != self._events:
                self.problems.append("another stream")
            self.streams += 1
            self.resumptions += resumed.resumptions


async def plain(session: aiohttp.ClientSession, body: dict[str, Any] = _PLAIN) -> str:
    async with session.post(_PATH, json=body) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["choices"][0]["text"])


async def undisturbed(url: str) -> tuple[str, Resumed]:
    async with aiohttp.ClientSession(url) as session:
        return await plain(session), await follow(url, _PATH, _LONG)


@pytest.mark.slow
def test_five_upgrades_in_a_row_under_load(tmp_path: Path) -> None:
    args = ("--model", str(checkpoint(tmp_path / "model")), *ARGS, *_MORE)
    servers = [Server(*args)]

    async def upgrades() -> None:
        for _ in range(5):
            servers.append(await replaced(servers[-1], *args))

    try:
        servers[0].wait_ready()
        url = servers[0].url
        text, stream = asyncio.run(undisturbed(url))
        load = Load(url, text, stream.events)
        asyncio.run(load.run(upgrades()))
        assert load.problems == []
        assert load.requests > 20 and load.resumptions >= 3 and load.streams >= 2
        assert all(server.url == url for server in servers)
    finally:
        for server in servers:
            server.kill()


@contextlib.contextmanager
def upgraded_server(*args: str) -> Iterator[tuple[Server, list[Server]]]:
    """A ready server, and a list for the one that replaces it; both are gone when the block ends."""
    new: list[Server] = []
    with running_server(*args) as old:
        try:
            yield old, new
        finally:
            for each in new:
                each.kill()


def kill_engine(server: Server) -> None:
    """SIGKILL of a worker."""
    os.kill(next(pid for pid, line in server.children().items() if "workers.main" in line), signal.SIGKILL)


@pytest.mark.slow
def test_streams_that_wait_for_a_dead_engine_go_on_at_the_new_server(tmp_path: Path) -> None:
    """It dies when the upgrade begins, and its next life when the new server has the sockets."""
    args = ("--model", str(checkpoint(tmp_path / "model")), *ARGS, *_MORE)
    bodies = [_LONG | {"seed": seed, "n": 1 + seed % 2} for seed in range(6)]
    expected: list[Resumed] = []
    found: list[Resumed] = []

    async def upgrade(old: Server, new: list[Server]) -> None:
        expected.extend(await asyncio.gather(*(follow(old.url, _PATH, body) for body in bodies)))
        begun = asyncio.Event()

        def on_event(resumed: Resumed) -> None:
            if len(resumed.events) == 30:
                begun.set()

        long = [body | {"max_tokens": 2500} for body in bodies]
        streams = [asyncio.create_task(follow(old.url, _PATH, body, on_event)) for body in long]
        await begun.wait()
        kill_engine(old)
        new.append(Server(*args, "--upgrade-from", str(old.process.pid)))
        await _until(lambda: "has taken over" in old.text())
        kill_engine(old)
        assert await asyncio.to_thread(old.process.wait, 90) == 0, old.text()
        found.extend(await asyncio.gather(*streams))

    with upgraded_server(*args) as (old, new):
        asyncio.run(upgrade(old, new))
    for one, other in zip(found, expected, strict=True):
        assert one.resumptions
        for index, text in other.texts.items():
            assert one.texts[index].startswith(text)


@pytest.mark.slow
def test_requests_of_a_leaving_server_outlive_its_engine(tmp_path: Path) -> None:
    """They cannot be resumed: the old server starts its engine again for them."""
    more = ("--api-server-count", "2", "--shutdown-timeout", "120")
    args = ("--model", str(checkpoint(tmp_path / "model")), *ARGS, *more)
    body = _PLAIN | {"max_tokens": 4000}

    async def upgrade(old: Server, new: list[Server]) -> list[str]:
        async with aiohttp.ClientSession(old.url) as session:
            expected = await plain(session, _PLAIN | {"max_tokens": 200})
            requests = [asyncio.create_task(plain(session, body)) for _ in range(4)]
            new.append(Server(*args, "--upgrade-from", str(old.process.pid)))
            await _until(lambda: "has taken over" in old.text())
            kill_engine(old)
            texts = await asyncio.gather(*requests)
        assert await asyncio.to_thread(old.process.wait, 90) == 0, old.text()
        return [text for text in texts if not text.startswith(expected)]

    with upgraded_server(*args) as (old, new):
        other = asyncio.run(upgrade(old, new))
        old.until("life 1, is ready")
    assert other == []


@pytest.mark.slow
def test_a_server_accepts_again_if_the_new_one_dies_after_its_takeover(tmp_path: Path) -> None:
    """A frontend of it has ended by then, and one has a stream. It can still be replaced."""
    more = ("--api-server-count", "2", "--shutdown-timeout", "120", "--orphan-grace", "150")
    socket = tmp_path / "admin"
    args = ("--model", str(checkpoint(tmp_path / "model")), *ARGS, *more, "--admin-socket", str(socket))
    texts: list[str] = []

    async def upgrade(old: Server, new: list[Server]) -> tuple[Resumed, Resumed]:
        expected = await follow(old.url, _PATH, _LONG | {"max_tokens": 6000})
        begun = asyncio.Event()
        on_event = lambda resumed: begun.set() if len(resumed.events) == 20 else None  # noqa: E731
        stream = asyncio.create_task(follow(old.url, _PATH, _LONG | {"max_tokens": 6000}, on_event))
        await begun.wait()
        new.append(Server(*args, "--upgrade-from", str(old.process.pid)))
        await _until(lambda: "has taken over" in old.text())
        await _until(lambda: sum("frontend.main" in line for line in old.children().values()) == 1)
        new[0].kill()
        for _ in range(40):
            async with aiohttp.ClientSession(old.url) as session:
                texts.append(await plain(session))
        await _until(lambda: sum("frontend.main" in line for line in old.children().values()) == 2)
        await _serves(old.url, socket)
        found = await stream
        new.append(await replaced(old, *args))
        async with aiohttp.ClientSession(old.url) as session:
            texts.append(await plain(session))
        return expected, found

    with upgraded_server(*args) as (old, new):
        expected, found = asyncio.run(upgrade(old, new))
        old.until("has died: this server accepts connections again")
    assert found.events == expected.events and not found.resumptions
    assert len(texts) == 41 and len(set(texts)) == 1


@pytest.mark.slow
def test_a_new_server_that_is_stopped_is_given_up(tmp_path: Path) -> None:
    """The old one goes on, and the new one ends when it runs again: both would accept connections."""
    args = ("--model", str(checkpoint(tmp_path / "model")), *ARGS)

    async def upgrade(old: Server, new: list[Server]) -> int:
        new.append(Server(*args, "--upgrade-from", str(old.process.pid)))
        await _until(lambda: "is going to take over" in old.text())
        os.kill(new[0].process.pid, signal.SIGSTOP)
        await _until(lambda: "this server goes on: it is stopped, or hangs" in old.text())
        async with aiohttp.ClientSession(old.url) as session:
            await plain(session)
        os.kill(new[0].process.pid, signal.SIGCONT)
        return await asyncio.to_thread(new[0].process.wait, 60)

    with upgraded_server(*args) as (old, new):
        assert asyncio.run(upgrade(old, new)) != 0
        new[0].until(f"error: --upgrade-from: process {old.process.pid} has given it up")


@pytest.mark.slow
def test_a_stream_does_not_go_on_with_another_model(tmp_path: Path) -> None:
    """The error says what differs; the old server still finishes what it can."""
    first = checkpoint(tmp_path / "first")
    second = checkpoint(tmp_path / "second", num_hidden_layers=5)

    async def upgrade(old: Server) -> tuple[str, Server]:
        begun = asyncio.Event()
        stream = asyncio.create_task(
            follow(old.url, _PATH, _LONG | {"max_tokens": 7000}, lambda _: begun.set())
        )
        await begun.wait()
        new = await replaced(old, "--model", str(second), *ARGS, *_MORE)
        with pytest.raises(AssertionError) as caught:
            await stream
        return str(caught.value), new

    with running_server("--model", str(first), *ARGS, *_MORE) as old:
        text, new = asyncio.run(upgrade(old))
        new.kill()
    assert "stream_of_other_model" in text and "num_hidden_layers" in text


@pytest.mark.slow
def test_a_signal_replaces_a_server_by_one_like_itself(tmp_path: Path) -> None:
    """The administration moves with it. One that fails to start leaves the running one as it is."""
    model = checkpoint(tmp_path / "model")
    socket = tmp_path / "admin"
    with running_server("--model", str(model), *ARGS, *_MORE, "--admin-socket", str(socket)) as old:
        config = (model / "config.json").read_text()
        (model / "config.json").write_text("{")
        old.process.send_signal(signal.SIGUSR2)
        asyncio.run(_until(lambda: "this server goes on" in old.text()))
        (model / "config.json").write_text(config)
        old.process.send_signal(signal.SIGUSR2)
        assert old.process.wait(180) == 0
        pid = int(old.text().rpartition(" has taken over")[0].rpartition("process ")[2])
        try:
            assert is_alive(pid)
            asyncio.run(_serves(old.url, socket))
        finally:
            _end(pid)


@pytest.mark.slow
def test_a_server_that_drains_is_replaced_by_one_that_serves(tmp_path: Path) -> None:
    """As after a restart: what administrators have set ends with the server."""
    socket = tmp_path / "admin"
    args = ("--model", str(checkpoint(tmp_path / "model")), *ARGS, *_MORE, "--admin-socket", str(socket))
    with running_server(*args) as old:
        asyncio.run(_drain(old.url, socket))
        new = asyncio.run(replaced(old, *args))
        try:
            assert "what an administrator has set ends with this server" in old.text()
            asyncio.run(_serves(new.url, socket))
        finally:
            new.kill()


async def _drain(url: str, admin: Path) -> None:
    """Returns once a frontend takes no request."""
    connector = aiohttp.UnixConnector(str(admin))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post("http://localhost/drain") as response,
    ):
        assert response.status == 200
    async with aiohttp.ClientSession(url) as session, asyncio.timeout(60):
        while True:
            async with session.get("/ready") as ready:
                if ready.status == 503:
                    return
            await asyncio.sleep(0.05)


def test_a_server_that_is_stopped_ends_the_one_that_was_to_replace_it(tmp_path: Path) -> None:
    with running_server("--model", str(checkpoint(tmp_path / "model")), *ARGS) as old:
        old.process.send_signal(signal.SIGUSR2)
        old.until("is going to take over")
        pid = int(old.text().rpartition(" is going to take over")[0].rpartition("process ")[2])
        try:
            assert old.terminate() == 0
            assert not is_alive(pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def _serves(url: str, admin: Path) -> None:
    async with aiohttp.ClientSession(url) as session:
        await plain(session)
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(admin))) as session,
        session.get("http://localhost/requests") as response,
    ):
        assert response.status == 200


async def _until(has_happened: Any) -> None:
    async with asyncio.timeout(120):
        while not has_happened():
            await asyncio.sleep(0.1)


def _end(pid: int) -> None:
    """SIGTERM, then SIGKILL for one that does not end."""
    os.kill(pid, signal.SIGTERM)
    try:
        asyncio.run(_until(lambda: not is_alive(pid)))
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        raise


@pytest.mark.slow
def test_engines_restart_one_after_the_other_under_load(tmp_path: Path) -> None:
    """Their requests go on at the other one: no text changes, and no stream is interrupted."""
    socket = tmp_path / "admin"
    args = ("-dp", "2", "--admin-socket", str(socket))
    with running_server("--model", str(checkpoint(tmp_path / "model")), *ARGS, *args) as server:
        text, stream = asyncio.run(undisturbed(server.url))
        load = Load(server.url, text, stream.events)
        asyncio.run(load.run(_restart_engines(server, socket)))
        server.until("engine 1, life 0.* an administrator has restarted it")
        ends = [line for line in server.log if "an administrator has restarted it" in line]
    assert load.problems == []
    assert load.requests > 5 and load.resumptions == 0
    assert len(ends) == 2 and "engine 0, life 0" in ends[0] and "engine 1, life 0" in ends[1]


async def _restart_engines(server: Server, admin: Path) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(admin))) as session:
        url = "http://localhost/restart_engines"
        async with session.post(url) as response:
            assert (await response.json())["left"] == [0, 1]
        async with session.post(url) as response:
            assert response.status == 409
        async with asyncio.timeout(200):
            while True:
                async with session.get(url) as response:
                    if not (await response.json())["left"]:
                        return
                await asyncio.sleep(0.3)
