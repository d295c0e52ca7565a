"""What an administrator changes, whose answers come in quick succession."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import zmq
import zmq.asyncio

from atom.shared.messages.admin import ServerState
from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.supervisor import Engines, RestartEngines, SetServerState, ToControl
from frontend.engine_client.supervisor_link import SupervisorLink

DEADLINE_S = 20


class FakeSupervisor:
    """Answers each change by the state that was wanted, and each restart by two lists at once."""

    def __init__(self, socket: zmq.asyncio.Socket):
        self._socket = socket
        self.state = ServerState()

    async def run(self) -> None:
        decoder = Decoder[ToControl](ToControl)
        while True:
            identity, frame = await self._socket.recv_multipart()
            message = decoder.decode(frame)
            answers = [Engines([])]
            if isinstance(message, SetServerState):
                self.state = message.state
                answers = [Engines([], state=self.state)]
            elif isinstance(message, RestartEngines):  # of an engine that is down, and restarts anyway
                answers = [Engines([], to_restart=[0]), Engines([])]
            for answer in answers:
                await self._socket.send_multipart([identity, encode(answer)])


@asynccontextmanager
async def link_to_supervisor(directory: Path) -> AsyncIterator[tuple[SupervisorLink, FakeSupervisor]]:
    endpoint = f"ipc://{directory}/control"
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        supervisor = FakeSupervisor(socket)
        link = SupervisorLink(endpoint, 0, ServerState())
        known = asyncio.Event()
        tasks = [
            asyncio.create_task(supervisor.run()),
            asyncio.create_task(link.follow(lambda _: known.set())),
        ]
        try:
            async with asyncio.timeout(DEADLINE_S):
                await known.wait()
                yield link, supervisor
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def test_changes_at_the_same_time_keep_one_another(tmp_path: Path) -> None:
    async def change() -> ServerState:
        async with link_to_supervisor(tmp_path) as (link, supervisor):
            await asyncio.gather(link.change_state(draining=True), link.change_state(log_level="debug"))
            return supervisor.state

    assert asyncio.run(change()) == ServerState("debug", draining=True)


def test_a_restart_that_is_over_at_once_has_been_started(tmp_path: Path) -> None:
    """Both lists may have come when what waits for the first one goes on."""

    async def restart() -> list[int]:
        async with link_to_supervisor(tmp_path) as (link, _):
            return await link.restart_engines()

    assert asyncio.run(restart()) in ([0], [])
