"""Frames of a plain ZeroMQ socket in an event loop: none is missed, also after a send."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from frontend.engine_client.frame_reader import FrameReader

DEADLINE_S = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    """(the socket to read, its peer)."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as ours, context.socket(zmq.DEALER) as peer:
        ours.bind("inproc://frames")
        peer.connect("inproc://frames")
        yield ours, peer


def test_frames_arrive_before_and_while_the_reader_waits(pair: tuple[Any, Any]) -> None:
    ours, peer = pair

    async def go() -> list[bytes]:
        peer.send(b"early")
        frames = FrameReader(ours)
        found = [await frames.recv()]
        asyncio.get_running_loop().call_later(0.02, peer.send, b"late")
        async with asyncio.timeout(DEADLINE_S):
            found.append(await frames.recv())
        frames.close()
        return found

    assert asyncio.run(go()) == [b"early", b"late"]


def test_a_frame_that_a_send_has_noticed_is_read(pair: tuple[Any, Any]) -> None:
    ours, peer = pair

    async def go() -> int:
        frames, found = FrameReader(ours), 0
        for number in range(200):
            reading = asyncio.create_task(frames.recv())
            await asyncio.sleep(0)
            peer.send(b"%d" % number)
            ours.send(b"x")  # handles the peer's frame, and so takes the signal for it
            assert ours.getsockopt(zmq.EVENTS) & zmq.POLLIN
            frames.check()
            async with asyncio.timeout(DEADLINE_S):
                found += await reading == b"%d" % number
            peer.recv()
        frames.close()
        return found

    assert asyncio.run(go()) == 200
