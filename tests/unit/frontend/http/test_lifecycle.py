"""On which sockets connections are accepted while another server has them."""

import asyncio
import socket

from frontend.http.lifecycle import Lifecycle


class Accepts:
    """Notes whether it was started and stopped."""

    def __init__(self, listening: socket.socket):
        self.states = ["made"]
        listening.close()

    async def start(self) -> None:
        self.states.append("started")

    async def stop(self) -> None:
        self.states.append("stopped")


def test_a_socket_that_comes_after_the_other_server_is_accepted_on_later() -> None:
    made: list[Accepts] = []

    def listen(listening: socket.socket) -> Accepts:
        made.append(Accepts(listening))
        return made[-1]

    async def check() -> None:
        lifecycle = Lifecycle()
        await lifecycle.listen(socket.socket(), listen)
        await lifecycle.leave()
        await lifecycle.listen(socket.socket(), listen)
        assert [each.states for each in made] == [["made", "started", "stopped"]]
        await lifecycle.come_back()
        assert [each.states[-1] for each in made] == ["stopped", "started", "started"]
        lifecycle.close()

    asyncio.run(check())
