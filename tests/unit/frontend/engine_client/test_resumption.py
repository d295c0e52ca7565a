"""Streams that several clients ask for at once."""

import asyncio

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
from frontend.errors import ResumedElsewhereError
from tests.helpers.fake_engines import Start, connected, start

__all__ = ["start"]

_NUMBER = 7


def test_a_stream_that_is_taken_away_before_its_reader_begins_ends_with_an_error(start: Start) -> None:
    """Two frontends claim it one after the other: it must not seem complete at the first one."""
    core = start(0)
    sampling = Sampling(0.7, 0, 1.0, 0.0, 11)
    asked = AddRequest(
        [_NUMBER], pack_ids([1, 2]), 50, sampling, resumable=Resumable("k", b"form", _NUMBER, 1)
    )
    found = [ClaimedRequest(encode(asked), [ClaimedSequence(_NUMBER, pack_ids([5, 6]))])]
    end = Finished(_NUMBER, FinishReason.REFUSED, message=RESUMED_ELSEWHERE)

    async def run() -> None:
        async with connected([core], orphan_grace=30.0) as client:
            engine = client.engines[0]
            resuming = asyncio.create_task(client.resumption.resume("k", ""))
            await asyncio.sleep(0)  # it sends its claim, which the core has not answered yet
            (number,) = client.resumption._waiting
            client._process(engine, Claimed(number, "k", found))
            client._process(engine, TokenDeltas(0, [], b"", finished=[end]))
            async with client.open_resumed(await resuming) as stream:
                with pytest.raises(ResumedElsewhereError):
                    await anext(stream)
            assert len(client) == 0

    asyncio.run(run())
