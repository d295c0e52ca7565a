"""Engines that compute prompts, engines that generate: the ids of one engine, also when either kind dies."""

import asyncio
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from atom import AsyncLLMEngine, LLMEngine, SamplingParams
from atom.shared.messages.engine import CoreStats
from engine_core.kv_tiers.leases import LEASE_S
from tests.helpers.checkpoints.tiny_models import prompt_of, save_tiny, tiny

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "cpu_threads": 1,
    "max_model_len": 256,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "block_size": 4,
    "num_kv_blocks": 96,
    "state_checkpoint_interval_tokens": 64,  # more slots for states than rows
}
PROMPTS = [prompt_of(3 + 9 * number, number) for number in range(9)]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=1.2 * (number % 2), seed=number, ignore_eos=True, logprobs=0)
    for number in range(len(PROMPTS))
]
LONG = SamplingParams(max_tokens=180, temperature=0.0, ignore_eos=True)
NIXL = {"kv_transfer_config": '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'}
DEADLINE_S = 90.0

pytestmark = pytest.mark.timeout(480)


@pytest.fixture(
    scope="module",
    params=["llama-gqa", pytest.param("qwen3-next", marks=pytest.mark.slow)],
    ids=["attention", "recurrent states"],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("model")
    save_tiny(tiny(request.param), directory)
    return str(directory)


async def read_ids(engine: AsyncLLMEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    async with asyncio.timeout(DEADLINE_S):
        return [
            token_id async for output in engine.generate(prompt, params) for token_id in output.output_tokens
        ]


async def stats_of(engine: AsyncLLMEngine) -> list[CoreStats]:
    found = await engine._service.client.control.stats(DEADLINE_S)
    return [found[rank] for rank in range(2) if rank in found]


async def until_both_are_ready(engine: AsyncLLMEngine) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not all(engine._service.client.engines.up.values()):
            await asyncio.sleep(0.05)


async def until_prompts_are_free(engine: AsyncLLMEngine) -> None:
    """Nothing is kept for the other engine any more, long before the deadline of a lease."""
    async with asyncio.timeout(LEASE_S / 4):
        while (await stats_of(engine))[0].kv_blocks_used:
            await asyncio.sleep(0.05)


async def killed(engine: AsyncLLMEngine, rank: int, expected: list[int]) -> None:
    """One of the engines is killed while a request runs, which goes on."""
    reader = asyncio.create_task(read_ids(engine, PROMPTS[-1], LONG))
    async with asyncio.timeout(DEADLINE_S):
        while not (await stats_of(engine))[-1].running and not reader.done():
            await asyncio.sleep(0.01)
    os.kill(engine._service._supervisor.pids()[f"engine {rank} core"], signal.SIGKILL)
    assert await reader == expected
    await until_both_are_ready(engine)
    assert await read_ids(engine, PROMPTS[-1], LONG) == expected


@pytest.mark.parametrize(
    "through",
    [
        "files",
        pytest.param(
            "NIXL", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
        ),
    ],
)
def test_ids_are_those_of_one_engine(model: str, tmp_path: Path, through: str) -> None:
    with LLMEngine(model, **OPTIONS) as alone:
        expected = [output["token_ids"] for output in alone.generate(PROMPTS, PARAMS)]
        (long,) = (output["token_ids"] for output in alone.generate([PROMPTS[-1]], LONG))

    files = {"kv_offload_dir": str(tmp_path / "kv"), "kv_offload_disk": "64M"}

    async def run() -> None:
        async with AsyncLLMEngine(
            model,
            data_parallel_size=2,
            prefill_engines=1,
            prefill_min_tokens=0,
            **(files if through == "files" else NIXL),
            **OPTIONS,
        ) as engine:
            ids = await asyncio.gather(*map(read_ids, [engine] * len(PROMPTS), PROMPTS, PARAMS))
            assert ids == expected
            prefill, decode = await stats_of(engine)
            assert prefill.generated_tokens == len(PROMPTS) - 1  # the first one has no block
            assert decode.kv_tiers[0].loaded > 0
            metrics = engine._service.client._metrics
            assert metrics.engine(0).handed_over == len(PROMPTS) - 1
            await until_prompts_are_free(engine)
            await killed(engine, 1, long)
            await killed(engine, 0, long)

    asyncio.run(run())
