"""Long work has threads of its own, and what may wait is bounded."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from frontend.errors import OverloadedError
from frontend.text.text_executor import TextExecutor

DEADLINE_S = 60.0
LARGE = 200 << 20


@pytest.fixture
def executor() -> Iterator[TextExecutor]:
    executor = TextExecutor()
    yield executor
    executor.shutdown()


def test_short_work_runs_while_long_work_holds_its_threads(executor: TextExecutor) -> None:
    release = threading.Event()

    async def run() -> list[str]:
        long = [asyncio.create_task(executor.run(2 << 20, lambda: release.wait(DEADLINE_S)))]
        long += [
            asyncio.create_task(executor.run(1 << 20, lambda: release.wait(DEADLINE_S))) for _ in range(4)
        ]
        await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            short = [await executor.run(4096, lambda: "short") for _ in range(20)]
        assert not any(task.done() for task in long)
        release.set()
        assert all(await asyncio.gather(*long))
        return short

    assert asyncio.run(run()) == ["short"] * 20


def test_tiny_work_runs_on_the_event_loop(executor: TextExecutor) -> None:
    assert asyncio.run(executor.run(100, threading.get_ident)) == threading.get_ident()
    assert asyncio.run(executor.run(4096, threading.get_ident)) != threading.get_ident()


def test_queued_bytes_are_bounded(executor: TextExecutor) -> None:
    release = threading.Event()

    async def run() -> None:
        first = asyncio.create_task(executor.run(LARGE, lambda: release.wait(DEADLINE_S)))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as caught:
            await executor.run(LARGE, lambda: None)
        assert (caught.value.status, caught.value.retry_after_s) == (429, 5)
        release.set()
        await first
        await executor.run(LARGE, lambda: None)

    asyncio.run(run())


def test_cancelled_work_leaves_the_queue(executor: TextExecutor) -> None:
    release, ran = threading.Event(), threading.Event()

    async def run() -> None:
        first = asyncio.create_task(executor.run(2 << 20, lambda: release.wait(DEADLINE_S)))
        second = asyncio.create_task(executor.run(LARGE, ran.set))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        release.set()
        await first
        await executor.run(LARGE, lambda: None)
        assert not ran.is_set()

    asyncio.run(run())
