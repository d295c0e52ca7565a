"""Streams: one wake-up for whatever came since the last."""

import asyncio
from array import array

import pytest

from frontend.engine_client.output_memory import HeldOutput, OutputMemory
from frontend.engine_client.streams import Stream, StreamOptions
from frontend.errors import EngineLostError
from frontend.text.output_processor import SequenceOutput


def update(request_id: int, text: str, finished: bool = False) -> SequenceOutput:
    return SequenceOutput(request_id, array("i", [ord(char) for char in text]), text, finished)


def made(request_ids: list[int], every_step: bool) -> Stream:
    output = HeldOutput(OutputMemory(1 << 30), 1 << 30, lambda _: None)
    return Stream(request_ids, StreamOptions(every_step), output)


async def read(stream: Stream) -> list[tuple[int, str, bool]]:
    updates = await asyncio.wait_for(anext(stream), 60)
    return [(item.request_id, item.text, item.finished) for item in updates]


async def is_quiet(stream: Stream) -> bool:
    """Whether a reader would wait now."""
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    if reader.done():
        return False
    reader.cancel()
    return True


def test_a_lagging_reader_gets_one_merged_update_a_choice() -> None:
    async def run() -> None:
        stream = made([1, 2], every_step=True)
        for text in "abc":
            stream.put(update(1, text), now=1.0)
        stream.put(update(2, "x", finished=True), now=2.0)
        assert await read(stream) == [(1, "abc", False), (2, "x", True)]
        assert await is_quiet(stream)
        stream.put(update(1, "d", finished=True), now=3.0)
        assert await read(stream) == [(1, "d", True)]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert (stream.first_token_at, stream.last_token_at) == (1.0, 3.0)

    asyncio.run(run())


def test_without_every_step_the_reader_wakes_when_all_have_ended() -> None:
    async def run() -> None:
        stream = made([1, 2], every_step=False)
        stream.put(update(1, "a", finished=True), now=1.0)
        stream.put(update(2, "b"), now=1.0)
        assert await is_quiet(stream)
        stream.put(update(2, "c", finished=True), now=1.0)
        assert await read(stream) == [(1, "a", True), (2, "bc", True)]

    asyncio.run(run())


def test_a_failure_comes_after_what_was_pending_and_stays() -> None:
    async def run() -> None:
        stream = made([1], every_step=True)
        stream.put(update(1, "a"), now=1.0)
        stream.fail(EngineLostError("gone"))
        assert await read(stream) == [(1, "a", False)]
        for _ in range(2):
            with pytest.raises(EngineLostError, match="gone"):
                await read(stream)

    asyncio.run(run())
