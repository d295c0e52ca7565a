"""When requests are sent, and how many are on their way at once.

What one process can drive, measured on two cores of an AMD EPYC that others used too
(`python -m tests.evaluation.serving_clients ceiling`): a token costs about 15 µs of CPU, a request on a
connection of its own 0.7 ms. 2,000 streams of 5 tokens/s each were reported to 0.01 %, of 10 to 3 %; beyond
that the time per token is the client's. 2,000 requests sent at once leave over more than a second, which the
last ones' time to the first token includes: --max-concurrency and --request-rate keep that small.
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
# Servers close idle connections after five seconds or more; a request must not meet that moment.
_KEEPALIVE_S = 3.0

Send = Callable[[RequestFuncInput], Awaitable[RequestFuncOutput]]


@dataclass(frozen=True)
class Load:
    """The shape of a run."""

    request_rate: float = float("inf")
    """Requests a second; inf sends all at once."""
    burstiness: float = 1.0
    """1 is a Poisson process; smaller comes in bursts, larger more evenly."""
    max_concurrency: int | None = None
    seed: int = 0


def arrival_times(count: int, load: Load) -> list[float]:
    """When each of `count` requests is sent, in seconds from the start; the first one at once.

    The gaps are drawn from a gamma distribution whose mean is 1 / rate and whose shape is the
    burstiness.
    """
    if load.request_rate == float("inf"):
        return [0.0] * count
    draw = np.random.default_rng(load.seed)
    gaps = draw.gamma(load.burstiness, 1 / (load.request_rate * load.burstiness), count - 1)
    times: list[float] = np.concatenate([[0.0], np.cumsum(gaps)]).tolist()
    return times


@contextlib.asynccontextmanager
async def open_session(max_concurrency: int | None) -> AsyncIterator[aiohttp.ClientSession]:
    """Connections are kept for the requests that follow, and are as many as may be in flight."""
    connector = aiohttp.TCPConnector(limit=max_concurrency or 0, keepalive_timeout=_KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_DEADLINE_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=_READ_BYTES
    ) as session:
        yield session


async def warm_up(send: Send, request: RequestFuncInput, count: int) -> None:
    """`count` untimed requests, one behind the other. Raises BenchmarkError for one that fails."""
    for _ in range(count):
        output = await send(request)
        if not output.success:
            raise BenchmarkError(f"the test request to {request.api_url} failed: {output.error}")


async def run_load(
    send: Send, requests: Sequence[RequestFuncInput], load: Load, show_progress: bool
) -> tuple[list[RequestFuncOutput], float]:
    """Outputs in the requests' order, and the seconds that it took."""
    times = arrival_times(len(requests), load)
    places = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else contextlib.nullcontext()
    with tqdm(total=len(requests), disable=not show_progress) as bar, _steady_memory():
        started = time.perf_counter()

        async def one(request: RequestFuncInput) -> RequestFuncOutput:
            async with places:
                output = await send(request)
            bar.update()
            return output

        tasks = []
        for request, due in zip(requests, times, strict=True):
            # Against the clock, so that late wake-ups do not add up.
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
            text, status = (await response.text()).strip(), response.status
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise BenchmarkError(f"--profile: {url} did not answer: {error}") from None
    if status != 200:
        raise BenchmarkError(
            f"--profile: {url} answered {status}: {text[:200]} (is the server's --torch-profiler-dir set?)"
        )


@contextlib.contextmanager
def _steady_memory() -> Iterator[None]:
    """What lives already is not searched for garbage again while times are taken."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
