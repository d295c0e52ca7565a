"""The client's connection to the core: silence, loss, errors in processing; each ends well."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from atom.shared.messages.engine import AddRequest, FinishReason
from frontend.engine_client.client import EngineClient
from frontend.engine_client.client_settings import ClientSettings
from frontend.engine_client.dp_router import DPRouter
from frontend.errors import ApiError, EngineLostError, UnavailableError
from frontend.metrics.metrics import Metrics
from frontend.text.output_processor import OutputProcessor, TextOptions
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.fake_engines import DEADLINE_S, IDS, generate, read, request, until

# A warning after 0.5 s; long enough that a loaded machine causes none by itself.
HANG_TIMEOUT_S = 3.0


class Panic(BaseException):
    """What a panic in a native extension looks like: no Exception."""


def script(_: AddRequest) -> Script:
    return Script(IDS, FinishReason.MAX_TOKENS)


def first_endless() -> Callable[[AddRequest], Script]:
    """The first request never ends."""
    first = iter([Script(IDS * 1000, None)])
    return lambda request: next(first, script(request))


def hold(core: FakeCore) -> threading.Event:
    """The core generates a few tokens, and goes on once the event is set."""
    may_go_on = threading.Event()
    core.waits = lambda: core.steps >= 5 and not may_go_on.is_set()
    return may_go_on


@asynccontextmanager
async def connected(core: FakeCore, hang_timeout: float = 600.0) -> AsyncIterator[EngineClient]:
    output = OutputProcessor(None)
    settings = ClientSettings(hang_timeout=hang_timeout)
    client = EngineClient([core.address], settings, DPRouter("prefix", 1, 16), output, Metrics())
    async with client:
        await asyncio.wait_for(client.engines.wait_started(), DEADLINE_S)
        yield client


def test_streams_wait_while_the_core_is_silent_and_continue_afterwards(tmp_path: Path) -> None:
    async def run(core: FakeCore) -> None:
        may_go_on = hold(core)
        async with connected(core, 6 * HANG_TIMEOUT_S) as client:
            async with client.open([request(client)], TextOptions()) as stream:
                reader = asyncio.create_task(read(stream))
                await until(lambda: stream.first_token_at)
                core.frozen.set()
                await until(lambda: not client.engines.is_ready)
                with pytest.raises(UnavailableError, match="engine core 0 has not responded for"):
                    client.check_ready()
                assert not reader.done()
                core.frozen.clear()
                await until(lambda: client.engines.is_ready)
                may_go_on.set()
                assert await reader == IDS
            assert await generate(client) == IDS

    with FakeCore(tmp_path, script, step_s=0.005) as core:
        asyncio.run(run(core))


def test_streams_of_a_hung_core_fail_and_the_link_heals(tmp_path: Path) -> None:
    async def run(core: FakeCore) -> None:
        async with connected(core, HANG_TIMEOUT_S) as client:
            async with client.open([request(client)], TextOptions()) as stream:
                await until(lambda: stream.first_token_at)
                core.frozen.set()
                await until(lambda: not client.engines.is_ready)
                with pytest.raises(EngineLostError, match="has not responded for 3 s"):
                    await read(stream)
            with pytest.raises(UnavailableError, match="has not responded for 3 s"):
                client.check_ready()
            core.frozen.clear()
            await until(lambda: client.engines.is_ready)
            assert await generate(client) == IDS

    with FakeCore(tmp_path, first_endless(), step_s=0.02) as core:
        asyncio.run(run(core))


def test_after_the_end_of_the_core_the_link_reconnects_to_a_new_one(tmp_path: Path) -> None:
    async def run(core: FakeCore) -> None:
        async with connected(core) as client:
            async with client.open([request(client)], TextOptions()) as stream:
                await until(lambda: stream.first_token_at)
                await asyncio.to_thread(core.__exit__)
                with pytest.raises(EngineLostError, match="closed its connection") as failure:
                    await read(stream)
            assert failure.value.code == "engine_dead"
            with pytest.raises(UnavailableError, match="the engine is gone") as refused:
                client.check_ready()
            assert refused.value.code == "engine_dead"
            with FakeCore(tmp_path, script):
                await until(lambda: client.engines.is_ready)
                assert await generate(client) == IDS

    core = FakeCore(tmp_path, first_endless(), step_s=0.02)
    core.__enter__()
    asyncio.run(run(core))


def test_a_frontend_that_the_core_dropped_connects_again(tmp_path: Path) -> None:
    async def run(core: FakeCore) -> None:
        async with connected(core) as client:
            async with client.open([request(client)], TextOptions()) as stream:
                await until(lambda: stream.first_token_at)
                core.drop_frontends("this frontend did not read its tokens in time")
                with pytest.raises(EngineLostError, match="did not read"):
                    await read(stream)
            await until(lambda: client.engines.is_ready)
            assert await generate(client) == IDS

    with FakeCore(tmp_path, first_endless(), step_s=0.02) as core:
        asyncio.run(run(core))


def test_a_panic_while_tokens_are_processed_fails_the_streams_and_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(core: FakeCore) -> None:
        async with connected(core) as client:

            def process(*_: object) -> None:
                monkeypatch.undo()
                raise Panic("index out of bounds")

            async with client.open([request(client)], TextOptions()) as stream:
                monkeypatch.setattr(client.output, "process", process)
                with pytest.raises(EngineLostError, match="an internal error of the frontend"):
                    await read(stream)
            await until(lambda: client.engines.is_ready)
            assert await generate(client) == IDS

    with FakeCore(tmp_path, first_endless(), step_s=0.005) as core:
        asyncio.run(run(core))


def test_a_request_after_the_engines_death_fails_in_its_stream(tmp_path: Path) -> None:
    async def run(core: FakeCore) -> None:
        async with connected(core) as client:
            await asyncio.to_thread(core.__exit__)
            await until(lambda: not client.engines.is_ready)
            async with client.open([request(client)], TextOptions()) as stream:
                with pytest.raises(ApiError) as failure:
                    await read(stream)
            assert (failure.value.status, failure.value.code) == (503, "engine_dead")
            assert len(client) == 0

    core = FakeCore(tmp_path, script)
    core.__enter__()
    asyncio.run(run(core))


def test_a_backlog_of_messages_does_not_hold_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(core: FakeCore) -> None:
        async with connected(core) as client:
            turns, done = 0, asyncio.Event()

            async def count_turns() -> None:
                nonlocal turns
                while not done.is_set():
                    turns += 1
                    await asyncio.sleep(0)

            def process(*given: Any) -> Any:
                time.sleep(0.02)  # longer than the reader may hold the loop
                turns_at.append(turns)
                return original(*given)

            turns_at: list[int] = []
            may_go_on, original = hold(core), client.output.process
            async with client.open([request(client)], TextOptions()) as stream:
                await until(lambda: stream.first_token_at)
                monkeypatch.setattr(client.output, "process", process)
                counter = asyncio.create_task(count_turns())
                may_go_on.set()
                assert await read(stream) == IDS
                done.set()
                await counter
            assert len(turns_at) > 10 and all(a < b for a, b in pairwise(turns_at))

    with FakeCore(tmp_path, script, step_s=0.001) as core:
        asyncio.run(run(core))


def slow_submission(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> list[AddRequest]:
    """Make each submission hold the loop longer than allowed; the list gets the submitted requests."""
    submitted: list[AddRequest] = []
    original = client._placement.send

    def send(sent: AddRequest, *others: Any) -> None:
        time.sleep(0.02)
        submitted.append(sent)
        original(sent, *others)

    monkeypatch.setattr(client._placement, "send", send)
    return submitted


def test_other_tasks_run_while_many_prompts_are_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(core: FakeCore) -> None:
        async with connected(core) as client:
            submitted = slow_submission(client, monkeypatch)
            requests, seen = [request(client) for _ in range(8)], set()

            async def observe() -> None:
                while True:
                    seen.add(len(submitted))
                    await asyncio.sleep(0)

            observer = asyncio.create_task(observe())
            async with client.open(requests, TextOptions()) as stream:
                observer.cancel()
                assert sorted(await read(stream)) == sorted(IDS * len(requests))
            assert seen >= set(range(1, len(requests)))
            assert len(client) == 0

    with FakeCore(tmp_path, script) as core:
        asyncio.run(run(core))


def test_a_request_cancelled_during_its_submission_is_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(core: FakeCore) -> None:
        async with connected(core) as client:
            submitted = slow_submission(client, monkeypatch)
            requests = [request(client) for _ in range(50)]

            async def generate_all() -> None:
                async with client.open(requests, TextOptions()):
                    pytest.fail("the submission was cancelled")

            opening = asyncio.create_task(generate_all())
            await until(lambda: len(submitted) >= 2)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert 2 <= len(submitted) < len(requests)
            assert len(client) == 0
            sent = [request_id for each in submitted for request_id in each.request_ids]
            await asyncio.to_thread(core.wait_for, lambda: sorted(core.aborted) == sent)

    with FakeCore(tmp_path, lambda _: Script(IDS, None)) as core:
        asyncio.run(run(core))


def test_the_submission_ends_with_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(core: FakeCore) -> None:
        async with connected(core) as client:
            submitted = slow_submission(client, monkeypatch)
            requests = [request(client) for _ in range(50)]

            async def generate_all() -> None:
                async with client.open(requests, TextOptions()) as stream:
                    await read(stream)

            opening = asyncio.create_task(generate_all())
            await until(lambda: submitted)
            client._lost(client.engines[0], "the engine has ended")
            with pytest.raises(EngineLostError, match="the engine has ended"):
                await opening
            assert len(submitted) < len(requests)
            assert len(client) == 0

    with FakeCore(tmp_path, lambda _: Script(IDS, None)) as core:
        asyncio.run(run(core))
