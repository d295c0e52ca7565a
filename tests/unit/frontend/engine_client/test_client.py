"""The client of several engines: ranks that die under streams, their next lives, and the choice of a rank."""

import asyncio
import random
import re
from collections import Counter
from contextlib import suppress

import pytest

from atom.shared.messages.supervisor import EngineEnded
from frontend.engine_client.client import EngineClient
from frontend.engine_client.client_settings import ClientHooks, ClientSettings
from frontend.engine_client.dp_router import DPRouter
from frontend.errors import EngineLostError, OverloadedError, RequestError, UnavailableError
from frontend.metrics.metrics import Metrics
from frontend.text.output_processor import OutputProcessor, TextOptions
from tests.helpers.servers.fake_engines import (
    DEADLINE_S,
    IDS,
    Start,
    connected,
    generate,
    read,
    received,
    request,
    running,
    start,
    until,
)

__all__ = ["start"]


def test_requests_are_spread_and_all_sequences_of_one_stay_together(start: Start) -> None:
    cores = [start(0), start(1), start(2)]

    async def run() -> None:
        async with connected(cores) as client:
            assert await asyncio.gather(*(generate(client) for _ in range(30))) == [IDS] * 30
            assert [received(core) for core in cores] == [10, 10, 10]
            assert sorted(await generate(client, n=5)) == sorted(IDS * 5)
            assert sorted(received(core) for core in cores) == [10, 10, 15]

    asyncio.run(run())


def test_a_death_fails_the_streams_of_that_rank_alone(start: Start) -> None:
    dying, living = start(0, endless=True), start(1, endless=True)

    async def run() -> None:
        async with connected([dying, living]) as client:
            lost = [await running(client, 0) for _ in range(3)]
            kept, stream = await running(client, 1)
            dying.die("worker 0: killed by SIGKILL")
            for reader, _ in lost:
                with pytest.raises(EngineLostError, match="worker 0: killed by SIGKILL") as failure:
                    await reader
                assert failure.value.code == "engine_dead"
            assert client.engines.is_ready and client.engines.up == {0: False, 1: True}
            client.check_ready()
            seen = stream.last_token_at
            await until(lambda: stream.last_token_at > seen)
            before = received(living)
            others = [await running(client, None) for _ in range(4)]  # type: ignore[arg-type]
            assert received(living) == before + 4
            for reader in (kept, *(reader for reader, _ in others)):
                reader.cancel()
            await asyncio.gather(kept, *(reader for reader, _ in others), return_exceptions=True)
            figures = client._metrics.engine(0).finish_reasons, client._metrics.engine(1).finish_reasons
            assert figures == ({"error": 3}, {"abort": 5})

    asyncio.run(run())


def test_a_new_life_takes_requests_and_the_old_one_ends_with_its_reason(start: Start) -> None:
    old, other = start(0, endless=True), start(1)

    async def run() -> None:
        async with connected([old, other]) as client:
            reader, _ = await running(client, 0)
            new = start(0, life=1)
            client.set_engines([new.address, other.address], [EngineEnded(0, 0, "worker 1: out of memory")])
            with pytest.raises(EngineLostError, match="worker 1: out of memory"):
                await reader
            await until(lambda: client.engines.up[0])
            assert await generate(client, rank=0) == IDS
            assert (received(old), received(new)) == (1, 1)
            assert client.engines[0].life == 1
            assert client.engines.restarts == {0: 1, 1: 0}

    asyncio.run(run())


def test_an_unchanged_list_changes_nothing(start: Start) -> None:
    cores = [start(0), start(1)]

    async def run() -> None:
        async with connected(cores) as client:
            before = list(client.engines)
            reader, _ = await running(client, 1)
            for _ in range(3):
                client.set_engines([core.address for core in cores], [EngineEnded(1, -1, "an earlier life")])
            assert list(client.engines) == before
            assert await reader == IDS

    asyncio.run(run())


def test_without_any_engine_requests_are_refused_until_one_is_back(start: Start) -> None:
    cores = [start(0), start(1)]

    async def run() -> None:
        async with connected(cores) as client:
            client.set_engines([], [EngineEnded(0, 0, "worker 0: killed"), EngineEnded(1, 0, "core: killed")])
            with pytest.raises(UnavailableError, match="worker 0: killed; core: killed") as refused:
                client.check_ready()
            assert (refused.value.code, refused.value.status) == ("engine_dead", 503)
            with pytest.raises(UnavailableError, match="is gone: core: killed"):
                client.check_ready(rank=1)
            with pytest.raises(UnavailableError):
                await generate(client)
            back = start(1, life=1)
            client.set_engines([back.address])
            await until(lambda: client.engines.is_ready)
            assert await generate(client) == IDS

    asyncio.run(run())


def test_a_life_that_starts_is_reported_as_starting(start: Start) -> None:
    cores = [start(0), start(1)]

    async def run() -> None:
        async with connected(cores) as client:
            client.set_engines([start(0, life=1, is_ready=False).address], [EngineEnded(0, 0, "killed")])
            with pytest.raises(UnavailableError, match="still starting"):
                client.check_ready()

    asyncio.run(run())


def test_a_rank_may_be_chosen(start: Start) -> None:
    cores = [start(0), start(1)]

    async def run() -> None:
        async with connected(cores, policy="prefix") as client:
            for _ in range(5):
                assert await generate(client, rank=1) == IDS
            assert [received(core) for core in cores] == [0, 5]
            for rank in (2, -1):
                with pytest.raises(RequestError, match=f"data_parallel_rank {rank} is none") as refused:
                    client.check_ready(rank)
                assert (refused.value.status, refused.value.param) == (400, "data_parallel_rank")
            cores[1].die("worker 0: killed")
            await until(lambda: not client.engines.up[1])
            with pytest.raises(UnavailableError, match="the engine is gone"):
                await generate(client, rank=1)
            assert await generate(client) == IDS

    asyncio.run(run())


def test_a_request_for_an_engine_that_starts_again_waits_for_it(start: Start) -> None:
    """As long as others serve; one for an engine that is not started again is refused."""
    cores = [start(0), start(1)]

    async def run() -> None:
        async with connected(cores, max_replays=3) as client:
            client.set_engines([cores[0].address], [EngineEnded(1, 0, "killed")])
            client.check_ready(1)
            waiting = asyncio.create_task(generate(client, rank=1, n=2))
            await until(lambda: len(client._replays) == 2)
            new = start(1, life=1)
            client.set_engines([cores[0].address, new.address], [EngineEnded(1, 0, "killed")])
            assert sorted(await waiting) == sorted(IDS * 2)
            assert (received(new), received(cores[0])) == (2, 0)
            client.set_engines([cores[0].address], [EngineEnded(1, 1, "out of memory", is_final=True)])
            with pytest.raises(UnavailableError, match="out of memory") as refused:
                client.check_ready(1)
            assert refused.value.retry_after_s
            client.set_engines([], [EngineEnded(0, 0, "killed"), EngineEnded(1, 1, "killed")])
            with pytest.raises(UnavailableError):
                client.check_ready(1)

    asyncio.run(run())


def test_a_request_waits_for_its_engine_no_longer_than_in_a_queue(start: Start) -> None:
    cores = [start(0), start(1)]

    async def run() -> None:
        async with connected(cores, max_replays=3, max_queue_s=0.2) as client:
            client.set_engines([cores[0].address], [EngineEnded(1, 0, "killed")])
            with pytest.raises(OverloadedError, match="--max-queue-time"):
                await generate(client, rank=1, n=2)
            assert len(client) == len(client._replays) == 0
            assert await generate(client, rank=0) == IDS

    asyncio.run(run())


def test_prompts_of_one_request_use_all_ranks_and_fail_together(start: Start) -> None:
    dying, living = start(0, endless=True), start(1, endless=True)

    async def run() -> None:
        async with connected([dying, living]) as client:
            requests = [request(client, n=2) for _ in range(4)]
            with pytest.raises(EngineLostError):
                async with client.open(requests, TextOptions()) as stream:
                    assert [client._placement._router.load(rank)[0] for rank in (0, 1)] == [4, 4]
                    await until(lambda: stream.first_token_at)
                    dying.die("killed")
                    await read(stream)
            assert len(client) == 0
            expected = [*requests[1].request_ids, *requests[3].request_ids]
            await asyncio.to_thread(living.wait_for, lambda: sorted(living.aborted) == expected)

    asyncio.run(run())


def test_a_slow_reader_delays_no_failure(start: Start) -> None:
    """The sequences on other ranks are aborted at once, and hide the error from no reader."""
    dying, living = start(0, endless=True), start(1, endless=True)

    async def run() -> None:
        async with connected([dying, living]) as client:
            requests = [request(client, n=2) for _ in range(4)]
            async with client.open(requests, TextOptions()) as stream:
                await until(lambda: stream.first_token_at)
                dying.die("killed")
                expected = [*requests[1].request_ids, *requests[3].request_ids]
                await asyncio.to_thread(living.wait_for, lambda: sorted(living.aborted) == expected)
                assert len(client) == 0 and client._placement._router.load(1) == (0, 0)
                with pytest.raises(EngineLostError):
                    async for _ in stream:
                        await asyncio.sleep(0.02)
            finished = client._metrics.engine(0).finish_reasons, client._metrics.engine(1).finish_reasons
            assert finished == ({"error": 4}, {"abort": 4})

    asyncio.run(run())


def test_ten_thousand_random_ends_leave_nothing(start: Start) -> None:
    """Requests are aborted while they are submitted, run, or fail; no counter is off afterwards."""
    generator = random.Random(7)
    cores = {rank: start(rank, endless=True) for rank in range(2)}
    lives = dict.fromkeys(cores, 0)
    sequences = 0

    async def one(client: EngineClient) -> None:
        nonlocal sequences
        requests = [request(client, generator.randint(1, 6)) for _ in range(generator.randint(1, 6))]
        sequences += sum(len(each.request_ids) for each in requests)
        rank, every_step = generator.choice((None, 0, 1)), generator.random() < 0.5
        with suppress(UnavailableError, EngineLostError):
            async with client.open(requests, TextOptions(), every_step, rank) as stream:
                if generator.random() < 0.5:
                    await asyncio.wait_for(anext(stream), generator.uniform(0, 0.02))

    async def run() -> None:
        async with connected(list(cores.values()), policy="prefix") as client:
            while sequences < 10_000:
                tasks = [asyncio.create_task(one(client)) for _ in range(20)]
                await asyncio.sleep(generator.uniform(0, 0.01))
                for task in generator.sample(tasks, 5):
                    task.cancel()
                if generator.random() < 0.2:
                    rank = generator.choice(list(cores))
                    cores[rank].die("killed")
                    lives[rank] += 1
                    cores[rank] = start(rank, lives[rank], endless=True)
                    client.set_engines(
                        [core.address for core in cores.values()], [EngineEnded(rank, 0, "killed")]
                    )
                await asyncio.gather(*tasks, return_exceptions=True)
            assert (len(client), client.output_memory.used) == (0, 0)
            assert [client._placement._router.load(rank) for rank in cores] == [(0, 0), (0, 0)]
            assert not client.output_memory._held
            counted = [sum(client._metrics.engine(rank).finish_reasons.values()) for rank in cores]
            assert sum(counted) <= sequences

    asyncio.run(run())


def test_admission_counts_the_engines_that_are_ready(start: Start) -> None:
    cores = [start(0), start(1)]

    async def run() -> None:
        async with connected(cores, max_num_seqs=10, max_queued=5) as client:
            client.admission.check(25)
            cores[0].die("killed")
            await until(lambda: not client.engines.up[0])
            client.admission.check(15)
            with pytest.raises(Exception, match="limit of 15"):
                client.admission.check(16)

    asyncio.run(run())
    assert ClientSettings(max_num_seqs=10, max_queued=5, num_frontends=4).capacity(2) == 7


def test_the_smallest_context_length_counts(start: Start) -> None:
    cores = [start(0, max_model_len=100), start(1, max_model_len=60)]
    seen: list[int] = []

    async def run() -> None:
        settings = ClientSettings(num_ranks=2)
        addresses = [core.address for core in cores]
        router, output = DPRouter("least_tokens", 2, block_size=16), OutputProcessor(None)
        client = EngineClient(addresses, settings, router, output, Metrics(), ClientHooks(seen.append))
        async with client:
            await until(lambda: all(client.engines.up.values()))
            assert client.engines.limits is not None and client.engines.limits.max_model_len == seen[-1] == 60
            client.set_engines(addresses[:1])
            assert client.engines.limits.max_model_len == 100

    asyncio.run(run())


def test_random_deaths_and_new_lives_lose_no_token_of_the_others(start: Start) -> None:
    """Every stream ends with all its tokens, or with the error of a rank that died under it."""
    generator = random.Random(5)
    cores = {rank: start(rank) for rank in range(3)}
    lives = dict.fromkeys(cores, 0)
    ends: Counter[str] = Counter()

    async def stream_one(client: EngineClient) -> None:
        try:
            n = generator.randint(1, 3)
            assert sorted(await generate(client, n=n)) == sorted(IDS * n)
            ends["complete"] += 1
        except EngineLostError as error:
            assert re.search(r"killed \d|closed its connection", error.message)
            ends["failed"] += 1

    async def kill_one(client: EngineClient) -> None:
        rank = generator.choice(list(cores))
        dying, life = cores.pop(rank), lives[rank]
        dying.die(f"killed {life}") if generator.random() < 0.5 else dying.frozen.set()
        await asyncio.sleep(generator.uniform(0, 0.02))
        ended = [EngineEnded(rank, life, f"killed {life}")]
        client.set_engines([core.address for core in cores.values()], ended)
        lives[rank] += 1
        cores[rank] = start(rank, lives[rank])
        client.set_engines([core.address for core in cores.values()], ended)

    async def run() -> None:
        async with connected(list(cores.values()), policy="prefix") as client:
            readers = []
            for number in range(300):
                readers.append(asyncio.create_task(stream_one(client)))
                await asyncio.sleep(0.003)
                if number % 25 == 24:
                    await kill_one(client)
            await asyncio.gather(*readers)
            await until(lambda: all(client.engines.up.values()))
            assert await asyncio.gather(*(generate(client, rank=rank) for rank in cores)) == [IDS] * 3
            assert len(client) == 0 and client._placement._router.load(0) == (0, 0)

    asyncio.run(run())
    assert ends["complete"] > 100 and ends["failed"] > 5 and sum(ends.values()) == 300


def test_the_figures_of_a_silent_core_are_left_out(start: Start) -> None:
    cores = [start(0), start(1)]

    async def run() -> None:
        async with connected(cores) as client:
            assert sorted(await client.control.stats(DEADLINE_S)) == [0, 1]
            await asyncio.to_thread(cores[1].freeze)
            both = await asyncio.gather(client.control.stats(2.0), client.control.stats(2.0))
            assert [sorted(stats) for stats in both] == [[0], [0]]
            cores[1].frozen.clear()
            assert sorted(await client.control.stats(DEADLINE_S)) == [0, 1]

    asyncio.run(run())
