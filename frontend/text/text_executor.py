"""Runs work on text in threads: JSON, chat templates, tokenizing, encoding of responses."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from frontend.errors import OverloadedError

__all__ = ["INLINE_BYTES", "TextExecutor"]

T = TypeVar("T")

INLINE_BYTES = 2048
"""Work on this much text takes about 1 ms, ten times the cost of using a thread."""
_SMALL_BYTES = 64 * 1024
_MEDIUM_BYTES = 1024 * 1024
_MAX_QUEUED_BYTES = 256 * 1024 * 1024
_RETRY_AFTER_S = 5


class _Lane:
    """Threads for work of up to `max_bytes` bytes (None: any size)."""

    def __init__(self, max_bytes: int | None, threads: int):
        self.max_bytes = max_bytes
        self.queued_bytes = 0
        """Bytes of work that is waiting or running."""
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="text")


class TextExecutor:
    """Three lanes by size of the work, so that short prompts never wait for long ones.

    The number of threads of a lane bounds the bytes in work at a time: each byte of text takes up
    to 100 bytes of memory while it is tokenized.
    """

    def __init__(self) -> None:
        self._lanes = [
            _Lane(_SMALL_BYTES, min(4, os.cpu_count() or 1)),
            _Lane(_MEDIUM_BYTES, 2),
            _Lane(None, 1),
        ]

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which processes `size` bytes; up to 2 KiB are processed in this thread.

        Raises OverloadedError when 256 MiB of work of similar size are queued.
        """
        if size <= INLINE_BYTES:
            return work()
        lane = next(lane for lane in self._lanes if lane.max_bytes is None or size <= lane.max_bytes)
        if lane.queued_bytes and lane.queued_bytes + size > _MAX_QUEUED_BYTES:
            raise OverloadedError(
                f"{lane.queued_bytes} bytes of text are waiting to be processed; try again later",
                _RETRY_AFTER_S,
            )
        lane.queued_bytes += size
        try:
            return await asyncio.get_running_loop().run_in_executor(lane.pool, work)
        finally:
            lane.queued_bytes -= size

    def shutdown(self) -> None:
        """Drop queued work; running work ends on its own."""
        for lane in self._lanes:
            lane.pool.shutdown(wait=False, cancel_futures=True)
