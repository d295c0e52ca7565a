"""The engine of a Dynamo worker without Dynamo: its requests, and its end."""

import asyncio
import os
import signal
from typing import Any

import pytest

from atom.integrations.dynamo.engine import DynamoEngine
from atom.shared.config.cli import engine_config_from_kwargs
from frontend.errors import EngineLostError, UnavailableError

pytestmark = pytest.mark.timeout(300)

DEADLINE_S = 60.0
MAX_LEN = 60_000
ENDLESS = MAX_LEN - 10


def request(**stops: Any) -> dict[str, Any]:
    return {"token_ids": [5, 6, 7], "sampling_options": {"temperature": 0.0}, "stop_conditions": stops}


async def until_generated(engine: DynamoEngine, least: int) -> int:
    """Returns how many tokens were generated, once there are so many. A slow engine is left out at first."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := await engine.stats()) or found[0].generated_tokens < least:
            await asyncio.sleep(0.01)
    return found[0].generated_tokens


async def until_begun(engine: DynamoEngine) -> None:
    """Returns once the only request has tokens."""
    await until_generated(engine, await until_generated(engine, 0) + 1)


async def chunks_of(engine: DynamoEngine, name: str, **stops: Any) -> list[dict[str, Any]]:
    return [chunk async for chunk in engine.generate(request(**stops), name)]


def test_requests_and_the_death_of_the_engine(model: str) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "load_dummy": True}
    options |= {"max_model_len": MAX_LEN, "num_kv_blocks": MAX_LEN // 16, "max_restarts": 0}
    deaths: list[str] = []

    async def run() -> None:
        config = engine_config_from_kwargs(model=model, **options)
        engine = DynamoEngine(config, {"model", *options}, deaths.append)
        try:
            assert (engine.prepare() / "tokenizer.json").exists()
            await engine.start()
            assert engine.limits.max_model_len == MAX_LEN and engine.kv_events is not None
            chunks = await chunks_of(engine, "short", max_tokens=5, ignore_eos=True)
            assert sum(len(chunk["token_ids"]) for chunk in chunks) == 5
            assert chunks[-1]["finish_reason"] == "length"
            await until_generated(engine, 5)
            aborted = asyncio.create_task(chunks_of(engine, "long", max_tokens=ENDLESS, ignore_eos=True))
            await until_begun(engine)
            await engine.abort("long")
            assert (await aborted)[-1]["finish_reason"] == "cancelled"
            await killed(engine)
        finally:
            await engine.close()
            await engine.close()

    async def killed(engine: DynamoEngine) -> None:
        lost = asyncio.create_task(chunks_of(engine, "lost", max_tokens=ENDLESS, ignore_eos=True))
        await until_begun(engine)
        os.kill(engine._service._supervisor.pids()["worker 0"], signal.SIGKILL)
        with pytest.raises(EngineLostError, match="worker 0: killed by SIGKILL"):
            await lost
        async with asyncio.timeout(DEADLINE_S):
            while not engine.death:
                await asyncio.sleep(0.01)
        with pytest.raises(UnavailableError, match="the engine is gone"):
            await chunks_of(engine, "late")
        assert deaths == [engine.death] and "worker 0: killed by SIGKILL" in engine.death

    asyncio.run(run())
