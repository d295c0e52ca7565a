"""The frontend's control connection to its supervisor, which says which engines there are."""

import os
from collections.abc import Callable

import zmq
import zmq.asyncio

from atom.messages.codec import Decoder, encode
from atom.messages.supervisor import Engines, GetEngines, control_identity
from atom.utils.logger import get_logger

__all__ = ["follow_engines"]


async def follow_engines(control: str, index: int, update: Callable[[Engines], None]) -> None:
    """Call `update` with each list of engines that the supervisor sends, until cancelled.

    `control` is the supervisor's endpoint, `index` the number of this frontend. A failure ends the process:
    without these messages it would send requests to engines that have ended.
    """
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, control_identity(index))
    decoder = Decoder[Engines](Engines)
    try:
        socket.connect(control)
        await socket.send(encode(GetEngines(index)))
        while True:
            update(decoder.decode(await socket.recv()))  # bounded by the supervisor's life: it ends us
    except Exception:
        get_logger().critical("the frontend cannot follow the supervisor", exc_info=True)
        os._exit(1)
    finally:
        socket.close(0)
        context.term()
