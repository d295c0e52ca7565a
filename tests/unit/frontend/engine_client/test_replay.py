"""Sequences whose engine ends run again, with what they have generated, and lose or repeat no token."""

import asyncio
import gc
import random
import threading
import time
from typing import Any

import pytest

from atom.shared.messages.codec import encode
from atom.shared.messages.engine import AddRequest, FinishReason, Sampling, TokenDeltas, pack_ids, unpack_ids
from atom.shared.messages.grammar import CompiledGrammar, GrammarBytes, RowGrammar
from atom.shared.messages.supervisor import EngineEnded
from frontend.engine_client import engine_connection
from frontend.engine_client.client import EngineClient
from frontend.engine_client.client_settings import ClientHooks, ClientSettings
from frontend.engine_client.dp_router import DPRouter
from frontend.engine_client.engine_connection import EngineConnection
from frontend.errors import ApiError, DeadlineError, EngineLostError
from frontend.metrics.metrics import Metrics
from frontend.text.live_grammars import LiveGrammars
from frontend.text.output_processor import OutputProcessor, TextOptions
from tests.helpers.servers.fake_core import Script
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

LONG = list(range(200))
PROMPT = [1, 2, 3]


def long_request(client: EngineClient, n: int = 1, prompt: list[int] = PROMPT, **fields: Any) -> AddRequest:
    sampling = Sampling(0.7, 0, 1.0, 0.0, 11, sequence=4)
    return AddRequest(client.new_ids(n), pack_ids(prompt), len(LONG), sampling, **fields)


def long_script(request: AddRequest) -> Script:
    """The output depends on the sequence: all of them differ."""
    own = request.sampling.sequence * 1000
    return Script([own + token for token in LONG])


def part_script(request: AddRequest) -> Script:
    """Half of it at first: it has not ended when its engine dies. The rest comes when it runs again."""
    made = long_script(request)
    return made if request.replays else Script(made.ids[:100], None)


async def by_sequence(
    client: EngineClient, requests: list[AddRequest], **options: Any
) -> dict[int, list[int]]:
    """The ids of each sequence of one stream."""
    found: dict[int, list[int]] = {i: [] for each in requests for i in each.request_ids}
    async with client.open(requests, TextOptions(), **options) as stream:
        async for updates in stream:
            for update in updates:
                found[update.request_id] += update.token_ids
    return found


def test_a_stream_goes_on_at_another_engine(start: Start) -> None:
    cores = [start(0, script=part_script), start(1, script=long_script)]

    async def run() -> None:
        async with connected(cores, max_replays=3) as client:
            asked = long_request(client, n=3, name="one", cache_salt="salt", eos_token_ids=[7])
            stream = asyncio.create_task(by_sequence(client, [asked]))
            await until(
                lambda: len(client._sequences) == 3 and client._metrics.engine(0).generated_tokens > 30
            )
            cores[0].die("worker 0: killed by SIGKILL")
            found = await stream
            for place, number in enumerate(asked.request_ids):
                assert found[number] == [(4 + place) * 1000 + token for token in LONG]
            again = {one.request_ids[0]: one for one in cores[1].requests}
            assert len(again) == 3
            for place, number in enumerate(asked.request_ids):
                message = again[number]
                ids = unpack_ids(message.prompt_ids).tolist()
                assert ids == PROMPT + found[number][: len(ids) - 3] and len(ids) > 3
                assert (message.prompt_length, message.max_tokens, message.replays) == (3, len(LONG), 1)
                assert (message.sampling.seed, message.sampling.sequence) == (11, 4 + place)
                assert (message.name, message.cache_salt, message.eos_token_ids) == ("one", "salt", [7])
            figures = client._metrics.engine(0), client._metrics.engine(1)
            assert (figures[0].replayed, dict(figures[0].finish_reasons)) == (3, {})
            assert dict(figures[1].finish_reasons) == {"length": 3}

    asyncio.run(run())


def test_a_sequence_that_lacks_only_its_end_has_ended(start: Start) -> None:
    """A core keeps the ends of prompts until their blocks are stored."""
    cores = [start(0, script=lambda _: Script(LONG, None)), start(1, script=long_script)]

    async def run() -> None:
        async with connected(cores, max_replays=3) as client:
            stream = asyncio.create_task(by_sequence(client, [asked := long_request(client)]))
            await until(lambda: client._metrics.engine(0).generated_tokens == len(LONG))
            cores[0].die("worker 0: killed by SIGKILL")
            assert await stream == {asked.request_ids[0]: LONG}
            assert not cores[1].requests
            assert dict(client._metrics.engine(0).finish_reasons) == {"length": 1}

    asyncio.run(run())


def test_a_grammar_is_sent_once_to_each_life_of_an_engine(start: Start) -> None:
    """Requests have its key alone, those that run again, too."""
    old = start(0, script=part_script)
    live = LiveGrammars()
    hooks = ClientHooks(grammar_source=live.source)

    async def run() -> None:
        async with connected([old], hooks=hooks, max_replays=3) as client:
            held = live.grammar(RowGrammar(b"key", [1]), CompiledGrammar(bytes(1 << 20), 1))
            asked = [long_request(client, grammar=held) for _ in range(8)]
            del held
            stream = asyncio.create_task(by_sequence(client, asked))
            await until(lambda: len(old.requests) == 8 and old.grammars)
            old.die("killed")
            await until(lambda: len(client._replays) == 8)
            new = start(0, life=1, script=long_script)
            client.set_engines([new.address], [EngineEnded(0, 0, "killed")])
            assert all(len(ids) == len(LONG) for ids in (await stream).values())
            for core in (old, new):
                assert core.grammars == [GrammarBytes(b"key", bytes(1 << 20))]
                assert len(core.requests) == 8
                assert all(each.grammar and len(encode(each)) < 2000 for each in core.requests)

    asyncio.run(run())
    gc.collect()
    assert live.source(b"key") is None


def test_prompts_wait_if_the_engine_ends_before_they_are_sent(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts of the request run at the next life; without one they fail with its reason."""
    old = start(0, script=part_script)

    async def run(revived: bool) -> None:
        async with connected([old], max_replays=3) as client:
            original = client._placement.send

            def send(*given: Any) -> None:
                time.sleep(0.02)  # longer than a submission may hold the loop
                original(*given)

            monkeypatch.setattr(client._placement, "send", send)
            asked = [long_request(client) for _ in range(8)]
            stream = asyncio.create_task(by_sequence(client, asked))
            await until(lambda: len(client._sequences) >= 2)
            end = EngineEnded(0, 0, "killed", is_final=not revived)
            assert len(client._sequences) < 8
            client.set_engines([], [end])
            if not revived:
                with pytest.raises(EngineLostError, match="killed"):
                    await stream
            else:
                await until(lambda: len(client._sequences) == 8)
                new = start(0, life=1, script=long_script)
                client.set_engines([new.address], [end])
                assert all(ids == long_script(asked[0]).ids for ids in (await stream).values())
            assert len(client._replays) == len(client) == 0

    asyncio.run(run(True))
    asyncio.run(run(False))


def test_the_next_life_of_the_only_engine_goes_on(start: Start) -> None:
    """New requests are refused meanwhile, and a stream whose client leaves waits no longer.

    What was accepted before and is sent only now, as its grammar took so long, waits, too.
    """
    old = start(0, script=part_script)

    async def run() -> None:
        async with connected([old], max_replays=3) as client:
            stream = asyncio.create_task(by_sequence(client, [asked := long_request(client)]))
            leaving = asyncio.create_task(by_sequence(client, [long_request(client)]))
            await until(lambda: client._metrics.engine(0).generated_tokens > 20)
            old.die("killed")
            await until(lambda: not client.engines.is_ready)
            with pytest.raises(ApiError, match="the engine is gone"):
                client.check_ready()
            accepted = asyncio.create_task(generate(client))
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await until(lambda: (len(client), len(client._replays)) == (2, 2))
            await asyncio.sleep(0.05)
            assert not stream.done()
            new = start(0, life=1, script=long_script)
            client.set_engines([new.address], [EngineEnded(0, 0, "killed")])
            assert await stream == {asked.request_ids[0]: [4000 + token for token in LONG]}
            assert await accepted == LONG
            assert received(new) == 2

    asyncio.run(run())


def test_a_sequence_without_a_token_starts_afresh(start: Start) -> None:
    """Also its prompt's log probabilities, of which a part may have come."""
    cores = [start(0, waits=lambda: True), start(1)]

    async def run() -> None:
        async with connected(cores, max_replays=1) as client:
            asked = AddRequest(client.new_ids(1), pack_ids(PROMPT), len(IDS), long_request(client).sampling,
                               prompt_logprobs=0)  # fmt: skip
            stream = asyncio.create_task(by_sequence(client, [asked]))
            await asyncio.to_thread(cores[0].wait_for, lambda: cores[0].requests)
            cores[0].die("killed")
            assert list((await stream).values()) == [IDS]
            message = cores[1].requests[0]
            assert (message.prompt_ids, message.prompt_length, message.prompt_logprobs) == (
                pack_ids(PROMPT),
                3,
                0,
            )

    asyncio.run(run())


def test_a_sequence_stays_at_the_rank_that_its_client_chose(start: Start) -> None:
    cores = [start(0, script=part_script), start(1, script=long_script)]

    async def run() -> None:
        async with connected(cores, max_replays=3) as client:
            stream = asyncio.create_task(by_sequence(client, [long_request(client)], rank=0))
            await until(lambda: client._metrics.engine(0).generated_tokens > 5)
            cores[0].die("killed")
            await until(lambda: len(client._replays))
            await asyncio.sleep(0.05)
            assert not cores[1].requests and not stream.done()
            new = start(0, life=1, script=long_script)
            client.set_engines([new.address, cores[1].address], [EngineEnded(0, 0, "killed")])
            assert [len(ids) for ids in (await stream).values()] == [len(LONG)]
            assert (received(new), received(cores[1])) == (1, 0)

    asyncio.run(run())


@pytest.mark.parametrize("final_first", [False, True])
def test_without_a_next_life_it_fails_with_the_cause(start: Start, final_first: bool) -> None:
    core = start(0, endless=True)

    async def run() -> None:
        async with connected([core], max_replays=3) as client:
            reader, _ = await running(client, 0)
            ends = [EngineEnded(0, 0, "out of memory", is_final=True)]
            if not final_first:
                core.die("out of memory")
                await until(lambda: len(client._replays))
            client.set_engines([], ends)
            with pytest.raises(EngineLostError, match="out of memory"):
                await reader
            assert len(client) == len(client._replays) == 0

    asyncio.run(run())


def test_a_rank_that_is_final_fails_its_own_alone(start: Start) -> None:
    both = threading.Event()
    cores = [start(0, endless=True), start(1, script=long_script, waits=lambda: not both.is_set())]

    async def run() -> None:
        async with connected(cores, max_replays=3) as client:
            bound, _ = await running(client, 0)
            free = asyncio.create_task(by_sequence(client, [long_request(client)]))
            await until(lambda: len(client) == 2)
            both.set()
            cores[0].die("killed")
            client.set_engines([cores[1].address], [EngineEnded(0, 0, "killed", is_final=True)])
            with pytest.raises(EngineLostError, match="killed"):
                await bound
            assert [len(ids) for ids in (await free).values()] == [len(LONG)]

    asyncio.run(run())


def test_deadlines_hold_while_a_sequence_waits(start: Start) -> None:
    """With tokens it ends with these, without any it fails."""
    cores = [start(0, script=part_script), start(1, waits=lambda: True)]

    async def run() -> None:
        async with connected(cores, max_replays=3) as client:
            begun, empty = (
                asyncio.create_task(by_sequence(client, [long_request(client)], rank=rank)) for rank in (0, 1)
            )
            await until(lambda: client._metrics.engine(0).generated_tokens > 5)
            for core in cores:
                core.die("killed")
            await until(lambda: len(client._replays) == 2)
            for stream in {each.stream for each in client._sequences.values()}:
                client._time_out(stream, 2.0)  # as its timer does, however late this test is
            ids = next(iter((await begun).values()))
            assert 5 < len(ids) < len(LONG)
            with pytest.raises(DeadlineError):
                await empty
            assert len(client) == len(client._replays) == 0
            assert dict(client._metrics.engine(0).finish_reasons) == {"abort": 1}

    asyncio.run(run())


def test_a_server_that_stops_ends_what_waits(start: Start) -> None:
    core = start(0, endless=True)
    settings = ClientSettings(hang_timeout=600.0, max_replays=3)

    async def run() -> None:
        router = DPRouter("round_robin", 1, block_size=16)
        async with EngineClient([core.address], settings, router, OutputProcessor(None), Metrics()) as client:
            await client.engines.wait_started()
            reader, _ = await running(client, 0)
            core.die("killed")
            await until(lambda: len(client._replays))
        with pytest.raises(EngineLostError, match="the server is stopping"):
            await reader
        assert len(client) == 0

    asyncio.run(run())


def test_a_dropped_frontend_goes_on_when_it_is_connected_again(start: Start) -> None:
    core = start(0, script=part_script)

    async def run() -> None:
        async with connected([core], max_replays=3) as client:
            stream = asyncio.create_task(by_sequence(client, [long_request(client)]))
            await until(lambda: client._metrics.engine(0).generated_tokens > 5)
            core.drop_frontends("this frontend did not read its tokens in time")
            assert list((await stream).values()) == [[4000 + token for token in LONG]]
            assert received(core) == 1 and len(core.requests) == 2

    asyncio.run(run())


def test_tokens_that_a_closed_engine_had_sent_come_from_the_next_one_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have arrived, but not been read, when the sequence moves."""
    endless = Script(list(range(4000, 100_000)), None)
    cores = [start(0, script=lambda _: endless), start(1, script=long_script)]

    async def run() -> None:
        async with connected(cores, max_replays=3) as client:
            deliver = client._deliver
            moved = late = 0

            def close_amid_frames(engine: EngineConnection, deltas: TokenDeltas) -> None:
                nonlocal moved, late
                late += engine.rank == 0 and moved > 0
                deliver(engine, deltas)
                sequence = next(iter(client._sequences.values()), None)
                if engine.rank == 0 and sequence is not None and sequence.progress.tokens > 5:
                    moved = sequence.progress.tokens
                    steps = cores[0].steps
                    cores[0].wait_for(lambda: cores[0].steps > steps + 3)
                    client.set_engines([cores[1].address], [EngineEnded(0, 0, "killed")])

            monkeypatch.setattr(client, "_deliver", close_amid_frames)
            monkeypatch.setattr(engine_connection, "YIELD_S", DEADLINE_S)
            found = await by_sequence(client, [long_request(client)])
            assert list(found.values()) == [[4000 + token for token in LONG]]
            assert len(unpack_ids(cores[1].requests[0].prompt_ids)) == len(PROMPT) + moved and not late

    asyncio.run(run())


def test_engines_that_end_together_get_nothing_meanwhile(start: Start) -> None:
    cores = [start(0, script=part_script), start(1, script=part_script)]

    async def run() -> None:
        async with connected(cores, max_replays=3, engines_end_together=True) as client:
            requests = [long_request(client), long_request(client)]
            stream = asyncio.create_task(by_sequence(client, requests))
            await until(lambda: client._metrics.engine(1).generated_tokens > 5)
            cores[0].die("killed")
            await until(lambda: len(client._replays))
            await asyncio.sleep(0.05)
            assert received(cores[1]) == 1
            cores[1].die("killed, too")
            new = [start(rank, life=1, script=long_script) for rank in (0, 1)]
            client.set_engines(
                [core.address for core in new], [EngineEnded(rank, 0, "killed") for rank in (0, 1)]
            )
            assert [len(ids) for ids in (await stream).values()] == [len(LONG)] * 2
            assert sum(received(core) for core in new) == 2

    asyncio.run(run())


class Lives:
    """Engines that start again as soon as they have died."""

    def __init__(self, start: Start, num_ranks: int, **fields: Any):
        self.cores = [start(rank, **fields) for rank in range(num_ranks)]
        self.deaths = 0
        self._start, self._fields = start, fields

    async def follow(self, client: EngineClient) -> None:
        """As the supervisor does, until cancelled."""
        while True:
            await asyncio.sleep(0.01)
            for rank, core in enumerate(self.cores):
                if core._stop.is_set():
                    self.deaths += 1
                    life = core.life + 1
                    self.cores[rank] = self._start(rank, life=life, **self._fields)
                    addresses = [each.address for each in self.cores]
                    client.set_engines(addresses, [EngineEnded(rank, core.life, "died")])


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(more, marks=pytest.mark.slow) for more in (1, 2))])
def test_no_stream_breaks_while_engines_die_at_random(start: Start, seed: int, together: bool) -> None:
    """Requests have several prompts and sequences; some clients leave. Nothing is left over."""
    generator = random.Random(seed)

    async def run() -> None:
        lives = Lives(start, 3, script=part_script)
        async with connected(lives.cores, max_replays=1000, engines_end_together=together) as client:
            follower = asyncio.create_task(lives.follow(client))
            streams = []
            for _ in range(40):
                await until(lambda: client.engines.is_ready)
                requests = [
                    long_request(client, generator.randint(1, 3)) for _ in range(generator.randint(1, 3))
                ]
                streams.append(asyncio.create_task(by_sequence(client, requests)))
                await asyncio.sleep(0)
            leaving = generator.sample(streams, 6)
            while not all(stream.done() for stream in streams):
                await asyncio.sleep(generator.uniform(0.02, 0.2))
                for core in lives.cores if together else [generator.choice(lives.cores)]:
                    core.die("killed")
                if leaving:
                    leaving.pop().cancel()
            follower.cancel()
            for ids in [
                ids for stream in streams if not stream.cancelled() for ids in stream.result().values()
            ]:
                assert ids in [[(4 + place) * 1000 + token for token in LONG] for place in range(3)]
            assert lives.deaths >= 3 and len(client) == 0
            replays = client._replays
            assert not (replays._cases or replays._waiting or replays._groups or replays._trial)
            assert replays._starting_ids == 0

    asyncio.run(run())


@pytest.mark.parametrize("dies_after", [0, 1, 60])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_request_that_ends_engines_fails_alone(start: Start, dies_after: int, num_ranks: int) -> None:
    """Whether its prompt does it or a later token; 20 others finish."""

    def script(request: AddRequest) -> Script:
        made = long_script(request)
        if unpack_ids(request.prompt_ids)[0] == 666:
            made.dies_after = dies_after
        return made

    async def run() -> None:
        lives = Lives(start, num_ranks, script=script)
        async with connected(lives.cores, max_replays=3) as client:
            follower = asyncio.create_task(lives.follow(client))
            others = [asyncio.create_task(by_sequence(client, [long_request(client)])) for _ in range(20)]
            poison = long_request(client, prompt=[666])
            guilty = asyncio.create_task(by_sequence(client, [poison]))
            with pytest.raises(EngineLostError, match="replays of the request have ended so"):
                async with asyncio.timeout(60):
                    await guilty
            async with asyncio.timeout(60):
                results = await asyncio.gather(*others)
            assert all(list(found.values()) == [[4000 + token for token in LONG]] for found in results)
            follower.cancel()
            assert lives.deaths <= 7
            assert sum(client._metrics.engine(rank).finish_reasons["error"] for rank in range(num_ranks)) == 1
            assert (len(client), len(client._replays), len(client._replays._cases)) == (0, 0, 0)

    asyncio.run(run())


def test_only_what_was_generated_is_sent_again(start: Start) -> None:
    """A request that ends while its engine dies is not sent again."""
    cores = [start(0), start(1)]

    async def run() -> None:
        async with connected(cores, max_replays=3) as client:
            assert await generate(client, rank=0) == IDS
            cores[0].die("killed")
            await until(lambda: not client.engines.up[0])
            async with client.open([request(client)], TextOptions()) as stream:
                assert await read(stream) == IDS
            assert received(cores[1]) == 1
            assert FinishReason.ABORTED not in cores[1].abort_reasons.values()

    asyncio.run(run())


def test_an_engine_that_responds_again_takes_what_waits(start: Start) -> None:
    """No message says so: its heartbeats do."""
    cores = [start(0, script=part_script), start(1, script=long_script)]

    async def run() -> None:
        async with connected(cores, max_replays=3, hang_timeout=12.0) as client:
            stream = asyncio.create_task(by_sequence(client, [long_request(client)]))
            await until(lambda: client._metrics.engine(0).generated_tokens > 5)
            cores[0].waits = lambda: True
            cores[1].frozen.set()
            await until(lambda: not client.engines.up[1])
            cores[0].die("killed")
            client.set_engines([cores[1].address], [EngineEnded(0, 0, "killed", is_final=True)])
            await until(lambda: len(client._replays) == 1)
            cores[1].frozen.clear()
            assert list((await stream).values()) == [[4000 + token for token in LONG]]

    asyncio.run(run())


def test_an_administrator_ends_what_waits(start: Start) -> None:
    core = start(0, script=part_script)

    async def run() -> None:
        async with connected([core], max_replays=3) as client:
            asked = [long_request(client, name=name) for name in ("one", "two")]
            streams = [asyncio.create_task(by_sequence(client, [each])) for each in asked]
            await until(lambda: len(client._sequences) == 2)
            await until(lambda: all(each.progress.tokens > 2 for each in client._sequences.values()))
            core.die("killed")
            await until(lambda: len(client._replays) == 2)
            assert await client.abort_named(["two", "three"]) == 1
            assert 0 < len((await streams[1])[asked[1].request_ids[0]]) < len(LONG)
            assert await client.abort_named([], everything=True) == 1
            await streams[0]
            assert len(client) == len(client._replays) == 0

    asyncio.run(run())


def test_after_a_fault_of_the_frontend_nothing_goes_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream may have missed tokens that count as emitted."""
    core = start(0, endless=True)

    async def run() -> None:
        async with connected([core], max_replays=3) as client:
            reader, _ = await running(client, 0)

            def fail(*args: object) -> None:
                raise RuntimeError("once")

            with monkeypatch.context() as patch:
                patch.setattr(type(client._metrics.engine(0)), "advanced", fail)
                with pytest.raises(EngineLostError, match="an internal error of the frontend"):
                    await reader
            await until(lambda: client.engines.up[0])
            assert len(client) == len(client._replays) == 0

    asyncio.run(run())


def test_replays_are_counted_when_waiting_sequences_fail_with_others(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = [start(0, script=part_script), start(1, endless=True)]

    async def run() -> None:
        async with connected(cores, max_replays=3) as client:
            bound = asyncio.create_task(by_sequence(client, [long_request(client, 3)], rank=0))
            await until(lambda: client._metrics.engine(0).generated_tokens > 5)
            cores[0].die("killed")
            await until(lambda: len(client._replays) == 3)
            other, _ = await running(client, 1)
            waiting = list(client._replays._waiting)
            monkeypatch.setattr(client._replays, "died", lambda lost, *engine: [*lost, *waiting])
            cores[1].die("killed")
            for failing in (bound, other):
                with pytest.raises(EngineLostError):
                    await failing
            monkeypatch.undo()
            assert [client._metrics.engine(rank).replayed for rank in (0, 1)] == [3, 0]

    asyncio.run(run())
