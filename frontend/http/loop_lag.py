"""Measures how long single callbacks block the event loop, and so all streams."""

import asyncio
from collections.abc import Callable

__all__ = ["watch_loop"]

INTERVAL_S = 0.02


async def watch_loop(observe: Callable[[float], None], interval_s: float = INTERVAL_S) -> None:
    """Call `observe` with the lateness of a timer, in seconds, `1 / interval_s` times a second."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(loop.time() - due, 0.0))
