"""Arrival times and concurrency."""

import asyncio
import itertools
import statistics

import pytest

from atom.benchmarks.backend_request_func import RequestFuncInput, RequestFuncOutput
from atom.benchmarks.serving.errors import BenchmarkError
from atom.benchmarks.serving.load import Load, arrival_times, run_load, warm_up

REQUESTS = [RequestFuncInput(f"number {i}", "http://x/v1/completions", 1, 1, "m") for i in range(12)]


def gaps(load: Load, count: int = 4000) -> list[float]:
    times = arrival_times(count, load)
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, Load()) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_intervals_have_the_mean_of_the_rate_and_the_variance_of_the_burstiness(burstiness: float) -> None:
    found = gaps(Load(request_rate=20, burstiness=burstiness))
    assert statistics.mean(found) == pytest.approx(0.05, rel=0.1)
    spread = statistics.pstdev(found) / statistics.mean(found)
    assert spread == pytest.approx(burstiness**-0.5, rel=0.1)


def test_arrivals_follow_the_seed() -> None:
    assert gaps(Load(5, seed=1)) == gaps(Load(5, seed=1)) != gaps(Load(5, seed=2))


def run(load: Load, seconds: float = 0.01) -> tuple[list[RequestFuncOutput], float, int]:
    """Outputs, seconds, and how many were in flight at most."""
    in_flight = most = 0

    async def send(request: RequestFuncInput) -> RequestFuncOutput:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(seconds)
        in_flight -= 1
        return RequestFuncOutput(generated_text=str(request.prompt), success=True)

    outputs, took = asyncio.run(run_load(send, REQUESTS, load, show_progress=False))
    return outputs, took, most


def test_concurrency_is_limited_and_outputs_are_in_order() -> None:
    outputs, took, most = run(Load(max_concurrency=4))
    assert most == 4 and took >= 0.03
    assert [output.generated_text for output in outputs] == [request.prompt for request in REQUESTS]
    assert run(Load())[2] == len(REQUESTS)


def test_a_rate_spreads_the_requests() -> None:
    load = Load(request_rate=100)
    assert run(load)[1] >= arrival_times(len(REQUESTS), load)[-1]


def test_a_test_request_that_fails_ends_the_benchmark() -> None:
    async def send(request: RequestFuncInput) -> RequestFuncOutput:
        return RequestFuncOutput(error="status 404: no such model")

    with pytest.raises(BenchmarkError, match="completions failed: status 404: no such model"):
        asyncio.run(warm_up(send, REQUESTS[0], 1))
    asyncio.run(warm_up(send, REQUESTS[0], 0))
