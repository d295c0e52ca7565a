"""Streams that several clients ask for at once."""

import asyncio

import msgspec
import pytest

from atom.shared.messages.codec import encode
from atom.shared.messages.engine import AddRequest, Finished, FinishReason, Sampling, TokenDeltas, pack_ids
from atom.shared.messages.resume import (
    RESUMED_ELSEWHERE,
    Claimed,
    ClaimedRequest,
    ClaimedSequence,
    Resumable,
)
from atom.shared.messages.supervisor import EngineEnded
from frontend.engine_client import client as engine_client
from frontend.errors import EngineError, ResumedElsewhereError
from frontend.text.output_processor import TextOptions
from tests.helpers.servers.fake_engines import Start, connected, start, until

__all__ = ["start"]

_NUMBER = 7


def request_of(numbers: list[int]) -> AddRequest:
    """A request of the stream k, with a sequence for each number."""
    sampling = Sampling(0.7, 0, 1.0, 0.0, 11)
    stream = Resumable("k", b"form", numbers[0], len(numbers))
    return AddRequest(numbers, pack_ids([1, 2]), 10_000, sampling, resumable=stream)


def test_a_stream_that_is_taken_away_before_its_reader_begins_ends_with_an_error(start: Start) -> None:
    """Two frontends claim it one after the other: it must not seem complete at the first one."""
    core = start(0)
    asked = request_of([_NUMBER])
    found = [ClaimedRequest(encode(asked), [ClaimedSequence(_NUMBER, pack_ids([5, 6]))])]
    end = Finished(_NUMBER, FinishReason.REFUSED, message=RESUMED_ELSEWHERE)

    async def run() -> None:
        async with connected([core], orphan_grace=30.0) as client:
            engine = client.engines[0]
            resuming = asyncio.create_task(client.resumption.resume("k", ""))
            await asyncio.sleep(0)  # it sends its claim, which the core has not answered yet
            (number,) = client.resumption._claims
            client._process(engine, Claimed(number, "k", found))
            client._process(engine, TokenDeltas(0, [], b"", finished=[end]))
            async with client.open_resumed(await resuming) as stream:
                with pytest.raises(ResumedElsewhereError):
                    await anext(stream)
            assert len(client) == 0

    asyncio.run(run())


def test_what_waits_for_an_engine_can_be_handed_over(start: Start) -> None:
    """What an engine runs is not: the engine hands it over."""
    core = start(0, endless=True)

    async def run() -> None:
        async with connected([core], orphan_grace=30.0, max_replays=3) as client:
            asked = request_of(numbers := client.new_ids(2))
            async with client.open([asked], TextOptions()) as reading:
                await until(lambda: len(client._sequences[numbers[0]].state.emitted) > 3)
                client.set_engines([], [EngineEnded(0, 0, "killed by SIGKILL")])
                assert client.resumption.without_engine() == []  # its client still reads it
            (left,) = client.resumption.without_engine()
            assert (left.key, left.ended) == ("k", []) and 0 < left.left_s <= 30
            (part,) = left.requests
            assert part.request == encode(asked)
            for number, sequence in zip(numbers, part.sequences, strict=True):
                emitted = client._sequences[number].state.emitted
                assert sequence.request_id == number and sequence.output_ids == emitted.tobytes()
            assert reading.open == set(numbers)
            client.resumption.close()

    asyncio.run(run())


def test_what_an_engine_runs_is_handed_over_by_it(start: Start) -> None:
    core = start(0, endless=True)

    async def run() -> None:
        async with connected([core], orphan_grace=30.0) as client:
            asked = request_of(client.new_ids(1))
            async with client.open([asked], TextOptions()) as reading:
                await anext(reading)
            assert len(client.resumption) == 1 and client.resumption.without_engine() == []

    asyncio.run(run())


def test_a_stream_whose_client_leaves_before_all_is_sent_is_not_kept(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was never sent has no sequence to go on with, at another frontend or server either."""
    monkeypatch.setattr(engine_client, "YIELD_S", -1.0)
    core = start(0, endless=True)

    async def run() -> None:
        async with connected([core], orphan_grace=30.0) as client:
            whole = request_of(client.new_ids(2))
            asked = [msgspec.structs.replace(whole, request_ids=[number]) for number in whole.request_ids]

            async def read() -> None:
                async with client.open(asked, TextOptions()):
                    pytest.fail("not all was sent")

            reading = asyncio.create_task(read())
            while not len(client):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            assert client.resumption.without_engine() == []
            assert len(client.resumption) == len(client) == 0

    asyncio.run(run())


def test_a_stream_that_fails_while_it_is_kept_is_not_handed_over(start: Start) -> None:
    """Nor does what its reader finds afterwards, such as a stop string, end it again."""
    core = start(0, endless=True)

    async def run() -> None:
        async with connected([core], orphan_grace=30.0) as client:
            asked = request_of(numbers := client.new_ids(2))
            async with client.open([asked], TextOptions()) as reading:
                await anext(reading)
            client.set_engines([], [EngineEnded(0, 0, "killed by SIGKILL")])
            assert reading.failed and len(client) == 0
            assert client.resumption.without_engine() == []
            client.finish(reading, numbers, FinishReason.STOP_STRING)

    asyncio.run(run())


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_stream_fails_with_the_first_of_its_sequences(start: Start, is_kept: bool) -> None:
    """Its client gets an error as the last event, and does not come back for the others."""
    core = start(0, endless=True)

    async def run() -> None:
        async with connected([core], orphan_grace=30.0) as client:
            asked = request_of(numbers := client.new_ids(2))
            end = Finished(numbers[0], FinishReason.ERROR, message="boom")
            failed = TokenDeltas(0, [], b"", finished=[end])
            async with client.open([asked], TextOptions()) as stream:
                await anext(stream)
                if not is_kept:
                    client._process(client.engines[0], failed)
                    with pytest.raises(EngineError, match="boom"):
                        async for _ in stream:
                            pass
            if is_kept:
                assert len(client.resumption) == 1
                client._process(client.engines[0], failed)
            assert len(client.resumption) == len(client) == 0 and client.resumption.without_engine() == []
            await until(lambda: core.aborted == [numbers[1]])

    asyncio.run(run())


def test_what_another_frontend_claims_from_one_engine_is_not_ended_at_the_next(start: Start) -> None:
    """Its claims are on their way to all engines: the end of the earlier connection may overtake one."""
    cores = [start(0, endless=True), start(1, endless=True)]

    async def run() -> None:
        async with connected(cores, orphan_grace=30.0) as client:
            whole = request_of(numbers := client.new_ids(2))
            asked = [msgspec.structs.replace(whole, request_ids=[number]) for number in numbers]
            async with client.open(asked, TextOptions()) as stream:
                await until(lambda: all(client._sequences[number].state.emitted for number in numbers))
                assert {client._sequences[number].rank for number in numbers} == {0, 1}
                engine = client._sequences[numbers[0]].engine
                assert engine is not None
                end = Finished(numbers[0], FinishReason.REFUSED, message=RESUMED_ELSEWHERE)
                client._process(engine, TokenDeltas(0, [], b"", finished=[end]))
                with pytest.raises(ResumedElsewhereError):
                    await anext(stream)
            assert len(client) == len(client.resumption) == 0
            later = client.new_ids(2)
            for rank, number in enumerate(later):
                plain = msgspec.structs.replace(whole, request_ids=[number], resumable=None)
                async with client.open([plain], TextOptions(), rank=rank):
                    pass
            await until(lambda: all(core.aborted for core in cores))
            assert [core.aborted for core in cores] == [[number] for number in later]

    asyncio.run(run())
