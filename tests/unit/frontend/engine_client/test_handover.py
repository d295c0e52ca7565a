"""Which engines get a prompt, and which go on with its first token."""

import asyncio
from typing import Any

import msgspec
import pytest

from atom.shared.messages.engine import AddRequest, FinishReason, pack_ids, unpack_ids
from atom.shared.messages.resume import Resumable
from frontend.engine_client.handover import Handovers
from frontend.text.output_processor import TextOptions
from tests.helpers.servers.fake_core import Script
from tests.helpers.servers.fake_engines import (
    GREEDY,
    IDS,
    Start,
    connected,
    read,
    request,
    start,
    until,
)

__all__ = ["start"]  # a fixture


def prompt(length: int = 40, most: int = 20, **fields: Any) -> AddRequest:
    return AddRequest([7], pack_ids(range(length)), most, GREEDY, **fields)


def test_prompts_go_to_some_engines_and_the_rest_to_the_others() -> None:
    handovers = Handovers(2, 16)
    sent, ranks = handovers.place(prompt(), [0, 1, 2, 3])
    assert ranks == [0, 1] and (sent.max_tokens, sent.stores_prompt) == (1, True)
    for whole in (
        prompt(16),
        prompt(most=1),
        prompt(prompt_length=39),
        prompt(prompt_logprobs=0),
        prompt(resumable=Resumable("key", b"", 7, 1)),
    ):
        assert handovers.place(whole, [0, 1, 2, 3]) == (whole, [2, 3])


def test_short_prompts_stay_with_the_engines_that_generate() -> None:
    handovers = Handovers(1, 16, 40)
    assert handovers.place(prompt(39), [0, 1]) == (prompt(39), [1])
    assert handovers.place(prompt(40), [0, 1])[1] == [0]


@pytest.mark.parametrize("ready", [[0], [1], [2, 3]])
def test_engines_of_one_kind_do_all(ready: list[int]) -> None:
    assert Handovers(2, 16).place(prompt(), ready) == (prompt(), ready)
    assert Handovers(0, 16).place(prompt(), [0, 1]) == (prompt(), [0, 1])


def test_a_request_goes_on_where_its_prompt_was_computed(start: Start) -> None:
    cores = [start(0, script=lambda one: Script(IDS[:1], FinishReason.MAX_TOKENS)), start(1)]

    async def run() -> None:
        async with connected(cores, prefill_engines=1, block_tokens=2) as client:
            async with client.open([request(client)], TextOptions()) as stream:
                ids = await read(stream)
            first, second = cores[0].requests[0], cores[1].requests[0]
            assert (first.stores_prompt, first.max_tokens) == (True, 1)
            assert not second.stores_prompt and second.max_tokens == len(IDS)
            assert (second.prompt_length, second.replays) == (3, 0)
            assert list(unpack_ids(second.prompt_ids)) == [1, 2, 3, IDS[0]]
            assert ids == IDS
            assert client._metrics.engine(0).handed_over == 1
            assert len(client) == 0

    asyncio.run(run())


def test_an_end_before_the_limit_is_one(start: Start) -> None:
    cores = [start(0, script=lambda one: Script(IDS[:1], FinishReason.EOS)), start(1)]

    async def run() -> None:
        async with connected(cores, prefill_engines=1, block_tokens=2) as client:
            async with client.open([request(client)], TextOptions()) as stream:
                assert await read(stream) == IDS[:1]
            assert not cores[1].requests

    asyncio.run(run())


def test_a_prompt_is_computed_again_when_its_engine_dies(start: Start) -> None:
    cores = [start(0, endless=True), start(1)]

    async def run() -> None:
        async with connected(cores, prefill_engines=1, block_tokens=2, max_replays=3) as client:
            async with client.open([request(client)], TextOptions()) as stream:
                await until(lambda: stream.first_token_at)
                client.set_engines([cores[1].address])
                ids = await read(stream)
            (again,) = cores[1].requests
            assert again.replays == 1 and again.max_tokens == len(IDS) and ids[-1] == IDS[-1]
            assert msgspec.structs.replace(again, request_ids=[]).stores_prompt is False

    asyncio.run(run())
