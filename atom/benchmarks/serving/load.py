"""Sends the requests at their arrival times, with a limit on those in flight.

Limits of one client process on two busy cores of an AMD EPYC (`python -m tests.evaluation.serving_clients
ceiling`): about 15 µs of CPU per token, 0.7 ms per request with a new connection. With 2,000 streams the
time per token is right within 0.01 % at 5 tokens/s each and 3 % at 10; beyond that it measures the client.
Sending 2,000 requests at once takes over a second, which the time to first token includes: use
--max-concurrency or --request-rate.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
from tqdm import tqdm

from atom.benchmarks.backend_request_func import RequestFuncInput, RequestFuncOutput
from atom.benchmarks.serving.errors import BenchmarkError

__all__ = ["Load", "Send", "arrival_times", "open_session", "post_profile", "run_load", "warm_up"]

_REQUEST_DEADLINE_S = 6 * 3600.0
_PROFILE_DEADLINE_S = 600.0
_READ_BYTES = 1 << 18
# Servers close idle connections after five seconds or more; a request must not race with that.
_KEEPALIVE_S = 3.0

Send = Callable[[RequestFuncInput], Awaitable[RequestFuncOutput]]


@dataclass(frozen=True)
class Load:
    """The load of a run."""

    request_rate: float = float("inf")
    """Requests per second; inf sends all at once."""
    burstiness: float = 1.0
    """1 is a Poisson process; below 1 is burstier, above more regular."""
    max_concurrency: int | None = None
    seed: int = 0


def arrival_times(count: int, load: Load) -> list[float]:
    """Seconds from the start at which each of `count` requests is sent; the first is 0.

    Intervals follow a gamma distribution with mean 1 / rate and the burstiness as its shape.
    """
    if load.request_rate == float("inf"):
        return [0.0] * count
    rng = np.random.default_rng(load.seed)
    intervals = rng.gamma(load.burstiness, 1 / (load.request_rate * load.burstiness), count - 1)
    times: list[float] = np.concatenate([[0.0], np.cumsum(intervals)]).tolist()
    return times


@contextlib.asynccontextmanager
async def open_session(max_concurrency: int | None) -> AsyncIterator[aiohttp.ClientSession]:
    """A session with at most `max_concurrency` connections, which requests reuse."""
    connector = aiohttp.TCPConnector(limit=max_concurrency or 0, keepalive_timeout=_KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_DEADLINE_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=_READ_BYTES
    ) as session:
        yield session


async def warm_up(send: Send, request: RequestFuncInput, count: int) -> None:
    """Send `count` untimed requests one after another. Raises BenchmarkError if one fails."""
    for _ in range(count):
        output = await send(request)
        if not output.success:
            raise BenchmarkError(f"the test request to {request.api_url} failed: {output.error}")


async def run_load(
    send: Send, requests: Sequence[RequestFuncInput], load: Load, show_progress: bool
) -> tuple[list[RequestFuncOutput], float]:
    """The outputs in the order of the requests, and the duration in seconds."""
    times = arrival_times(len(requests), load)
    slots = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else contextlib.nullcontext()
    with tqdm(total=len(requests), disable=not show_progress) as bar, _no_collection():
        started = time.perf_counter()

        async def one(request: RequestFuncInput) -> RequestFuncOutput:
            async with slots:
                output = await send(request)
            bar.update()
            return output

        tasks = []
        for request, due in zip(requests, times, strict=True):
            # Relative to the start, so that late wake-ups do not accumulate.
            wait = started + due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(request)))
        outputs = await asyncio.gather(*tasks)
        return outputs, time.perf_counter() - started


async def post_profile(session: aiohttp.ClientSession, url: str) -> None:
    """Start or stop the server's profiler. Raises BenchmarkError."""
    timeout = aiohttp.ClientTimeout(total=_PROFILE_DEADLINE_S)
    try:
        async with session.post(url, timeout=timeout) as response:
            text = (await response.text()).strip()
            status = response.status
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise BenchmarkError(f"--profile: {url} did not answer: {error}") from None
    if status != 200:
        raise BenchmarkError(
            f"--profile: {url} answered {status}: {text[:200]} (is the server's --torch-profiler-dir set?)"
        )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Exclude existing objects from garbage collection during the run."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
