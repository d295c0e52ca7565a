"""Updates that are sent where they are received, without waking the reader of their stream."""

import asyncio
from array import array
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from frontend.engine_client.output_memory import HeldOutput, OutputMemory
from frontend.engine_client.streams import Stream, StreamOptions
from frontend.errors import EngineLostError
from frontend.text.output_processor import SequenceOutput

Seen = list[tuple[str, str]]
"""(who sent it, text)."""


def a_stream() -> Stream:
    output = HeldOutput(OutputMemory(1 << 20), 1 << 20, lambda error: None)
    return Stream([1], StreamOptions(), output)


def update(text: str, finished: bool = False) -> SequenceOutput:
    return SequenceOutput(1, array("i", [7]), text, finished, "eos" if finished else None)


def run(test: Callable[[Stream, Seen], Coroutine[Any, Any, None]]) -> Seen:
    """What `test` and the stream's reader have seen, in order."""

    async def go() -> Seen:
        stream, seen = a_stream(), Seen()

        async def read() -> None:
            async for updates in stream:
                seen.extend(("reader", one.text) for one in updates)

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        await test(stream, seen)
        async with asyncio.timeout(60):
            await reader
        return seen

    return asyncio.run(go())


def test_updates_are_sent_at_once_while_the_reader_waits_and_the_last_is_read() -> None:
    async def test(stream: Stream, seen: Seen) -> None:
        stream.send_at_once(lambda one: seen.append(("sent", one.text)) is None)
        for text in "abc":
            stream.put(update(text), 1.0)
        assert seen == [("sent", "a"), ("sent", "b"), ("sent", "c")]
        stream.put(update("d", finished=True), 2.0)

    assert run(test)[3:] == [("reader", "d")]


def test_what_cannot_be_sent_goes_to_the_reader_and_so_does_all_until_it_has_read() -> None:
    flowing = False

    async def test(stream: Stream, seen: Seen) -> None:
        nonlocal flowing

        def send(one: SequenceOutput) -> bool:
            if flowing:
                seen.append(("sent", one.text))
            return flowing

        stream.send_at_once(send)
        stream.put(update("a"), 1.0)
        flowing = True
        stream.put(update("b"), 1.0)  # "a" waits: "b" must not overtake it
        assert seen == []
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.put(update("c"), 1.0)
        stream.put(update("d", finished=True), 1.0)

    assert run(test) == [("reader", "ab"), ("sent", "c"), ("reader", "d")]


def test_an_error_while_sending_is_raised_in_the_reader_alone() -> None:
    async def test(stream: Stream, seen: Seen) -> None:
        def broken(one: SequenceOutput) -> bool:
            raise RuntimeError("no events for this")

        stream.send_at_once(broken)
        stream.put(update("a"), 1.0)
        stream.put(update("b"), 1.0)
        assert stream.failed

    with pytest.raises(RuntimeError, match="no events"):
        run(test)


def test_a_failed_stream_sends_nothing_more() -> None:
    async def test(stream: Stream, seen: Seen) -> None:
        stream.send_at_once(lambda one: seen.append(("sent", one.text)) is None)
        stream.fail(EngineLostError("the worker has ended"))
        stream.put(update("a"), 1.0)
        assert seen == []

    with pytest.raises(EngineLostError):
        run(test)
