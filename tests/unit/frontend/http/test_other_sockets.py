"""Connections to the sockets of frontends that are down are accepted by another one."""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from frontend.http.connections import Listener
from frontend.http.limits import HttpLimits
from frontend.http.other_sockets import OtherSockets
from frontend.metrics.metrics import Metrics

LOCAL = "127.0.0.1"
DEADLINE_S = 60.0


class Answers:
    """Sends a letter on each connection of `listening`."""

    def __init__(self, listening: socket.socket):
        self.socket = listening
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"a")
            writer.close()

        self._server = await asyncio.start_server(connected, sock=self.socket)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()


class Fails(Answers):
    async def start(self) -> None:
        self.socket.close()
        raise OSError(errno.EMFILE, "too many open files")


Check = Callable[[OtherSockets, list[socket.socket]], Awaitable[None]]


async def answered(listening: socket.socket) -> bool:
    """Whether a new connection is answered within a short time."""
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    try:
        return await asyncio.wait_for(reader.read(1), 0.3) == b"a"
    except TimeoutError:
        return False
    finally:
        writer.close()


async def until_answered(listening: socket.socket) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await answered(listening):
            pass


def run(check: Check, kind: type[Answers] = Answers) -> None:
    """`check` with the sockets of the frontends 4 and 6, which are kept open as the supervisor does."""

    async def main() -> None:
        kept = [socket.create_server((LOCAL, 0)) for _ in range(2)]
        others = OtherSockets({4: kept[0].dup().detach(), 6: kept[1].dup().detach()})
        others.start(kind)
        try:
            await check(others, kept)
        finally:
            await others.stop()
            for each in kept:
                each.close()

    asyncio.run(main())


def test_those_that_are_down_are_answered_until_they_are_back() -> None:
    async def check(others: OtherSockets, kept: list[socket.socket]) -> None:
        assert not await answered(kept[0])
        others.set_down([4, 99])
        await until_answered(kept[0])
        assert not await answered(kept[1])
        others.set_down([6])
        await until_answered(kept[1])
        assert not await answered(kept[0])
        others.set_down([4, 6])
        await until_answered(kept[0])
        await until_answered(kept[1])

    run(check)


def test_a_connection_that_waits_already_is_answered() -> None:
    async def check(others: OtherSockets, kept: list[socket.socket]) -> None:
        reader, writer = await asyncio.open_connection(*kept[1].getsockname())
        others.set_down([6])
        assert await asyncio.wait_for(reader.read(1), DEADLINE_S) == b"a"
        writer.close()

    run(check)


def test_what_was_down_before_the_start_is_answered_after_it() -> None:
    async def check() -> None:
        with socket.create_server((LOCAL, 0)) as kept:
            others = OtherSockets({1: kept.dup().detach()})
            others.set_down([1])
            others.start(Answers)
            await until_answered(kept)
            await others.stop()

    asyncio.run(check())


def test_after_the_end_nothing_listens() -> None:
    """Also on the sockets that nothing was accepted from: a client must not wait in them."""

    async def check() -> None:
        with socket.create_server((LOCAL, 0)) as kept:
            others = OtherSockets({0: kept.dup().detach()})
            others.start(Answers)
            await others.stop()
            await others.stop()
            address = kept.getsockname()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)

    asyncio.run(check())


def test_a_server_ends_while_it_accepts_for_another_frontend() -> None:
    """Its runner stops all that accept before it ends what else the server has."""

    async def stop(app: web.Application) -> None:
        await others.stop()

    async def check() -> None:
        app = web.Application()
        app.on_shutdown.append(stop)
        runner = web.AppRunner(app)
        await runner.setup()
        others.start(lambda listening: Listener(runner, listening, HttpLimits(), Metrics()))
        others.set_down([1])
        async with asyncio.timeout(DEADLINE_S):
            while not runner.sites:
                await asyncio.sleep(0.01)
        await runner.cleanup()

    with socket.create_server((LOCAL, 0)) as kept:
        others = OtherSockets({1: kept.dup().detach()})
        asyncio.run(check())
        assert not others._listeners


def test_a_socket_that_cannot_be_used_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def check(others: OtherSockets, kept: list[socket.socket]) -> None:
        for _ in range(2):
            caplog.clear()
            others.set_down([4])
            async with asyncio.timeout(DEADLINE_S):
                while (
                    "connections of frontend 4 wait for it: [Errno 24] too many open files" not in caplog.text
                ):
                    await asyncio.sleep(0.01)

    run(check, Fails)
