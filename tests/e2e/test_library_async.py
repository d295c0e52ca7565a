"""The library in an event loop: concurrent requests, their ends, and engines that die."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from atom import AsyncLLMEngine, LLMEngine, SamplingParams
from atom.engine.llm_engine import EngineDeadError
from atom.shared.outputs import RequestOutput
from tests.helpers.checkpoints.tiny_models import prompt_of

pytestmark = pytest.mark.timeout(300)

MAX_LEN = 60_000
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "cpu_threads": 1,
    "load_dummy": True,
    "max_model_len": MAX_LEN,
    "num_kv_blocks": MAX_LEN // 16,
}
PROMPTS = [prompt_of(5 + number % 30, number) for number in range(24)]
PARAMS = [
    SamplingParams(max_tokens=16, temperature=1.2 * (number % 2), seed=number, ignore_eos=True)
    for number in range(len(PROMPTS))
]
ENDLESS = SamplingParams(max_tokens=MAX_LEN - 100, ignore_eos=True)
DEADLINE_S = 60.0


async def read(engine: AsyncLLMEngine, *request: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*request)]


async def read_ids(engine: AsyncLLMEngine, *request: Any) -> list[int]:
    return [token_id for output in await read(engine, *request) for token_id in output.output_tokens]


async def until_idle(engine: AsyncLLMEngine) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await engine._service.client.control.stats(DEADLINE_S))[0].running:
            await asyncio.sleep(0.01)


def pid_of(engine: AsyncLLMEngine, name: str) -> int:
    return engine._service._supervisor.pids()[name]


def test_outputs_are_those_of_the_offline_engine(model: str) -> None:
    with LLMEngine(model, **OPTIONS) as offline:
        expected = [output["token_ids"] for output in offline.generate(PROMPTS, PARAMS)]

    async def run() -> None:
        async with AsyncLLMEngine(model, **OPTIONS) as engine:
            assert engine.max_model_len == MAX_LEN and engine.config.scheduler.max_num_seqs is not None
            ids = await asyncio.gather(*map(read_ids, [engine] * len(PROMPTS), PROMPTS, PARAMS))
            assert ids == expected
            await both_sequences(engine)
            await refusals(engine)
            await aborted_by_name(engine)
            await aborted_by_its_reader(engine)

    asyncio.run(run())


async def both_sequences(engine: AsyncLLMEngine) -> None:
    params = SamplingParams(max_tokens=4, temperature=1.0, n=2, logprobs=1, ignore_eos=True)
    outputs = await read(engine, PROMPTS[0], params, "two")
    assert {output.request_id for output in outputs} == {"two"}
    for index in range(2):
        own = [output for output in outputs if output.index == index]
        assert [output.finished for output in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].finish_reason == "max_tokens"
        assert sum(len(output.output_tokens) for output in own) == 4
        assert sum(len(output.logprobs) for output in own) == 4


async def refusals(engine: AsyncLLMEngine) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        await read(engine, [])
    with pytest.raises(TypeError, match="the prompt is neither"):
        await read(engine, ["one", "two"])
    with pytest.raises(ValueError, match="maximum context length"):
        await read(engine, PROMPTS[0], SamplingParams(max_tokens=MAX_LEN))


async def aborted_by_name(engine: AsyncLLMEngine) -> None:
    reasons = []
    async for output in engine.generate(PROMPTS[0], ENDLESS, "long"):
        if not reasons:
            await engine.abort("long")
            await engine.abort("unknown")
        reasons.append(output.finish_reason)
    assert reasons[-1] == "aborted"


async def aborted_by_its_reader(engine: AsyncLLMEngine) -> None:
    async with aclosing(engine.generate(PROMPTS[0], ENDLESS)) as outputs:
        await anext(outputs)
    await until_idle(engine)
    reader = asyncio.create_task(read(engine, PROMPTS[0], ENDLESS))
    await asyncio.sleep(0.1)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await until_idle(engine)


def test_requests_go_on_after_the_death_of_a_worker(model: str) -> None:
    params = SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True)

    async def run() -> None:
        async with AsyncLLMEngine(model, **OPTIONS) as engine:
            expected = await read_ids(engine, PROMPTS[0], params)
            ids: list[int] = []
            async for output in engine.generate(PROMPTS[0], params):
                if not ids:
                    os.kill(pid_of(engine, "worker 0"), signal.SIGKILL)
                ids += output.output_tokens
            assert ids == expected

    asyncio.run(run())


def test_a_dead_engine_says_so(model: str) -> None:
    async def run() -> None:
        async with AsyncLLMEngine(model, max_restarts=0, **OPTIONS) as engine:
            outputs = engine.generate(PROMPTS[0], ENDLESS)
            await anext(outputs)
            os.kill(pid_of(engine, "worker 0"), signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="worker 0: killed by SIGKILL"):
                async with asyncio.timeout(DEADLINE_S):
                    while True:
                        await anext(outputs)
            async with asyncio.timeout(DEADLINE_S):
                while not engine._service.death:
                    await asyncio.sleep(0.01)
            with pytest.raises(EngineDeadError, match="worker 0: killed by SIGKILL"):
                await read(engine, PROMPTS[0])

    asyncio.run(run())


def test_a_program_that_does_not_close_its_engine_ends(model: str, run_directories: Path) -> None:
    program = """
import asyncio, json, sys
from atom import AsyncLLMEngine

async def run():
    engine = AsyncLLMEngine(sys.argv[1], **json.loads(sys.argv[2]))
    await engine.start()
    async for output in engine.generate("one two"):
        return

asyncio.run(run())
"""
    command = [sys.executable, "-c", program, model, json.dumps(OPTIONS)]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert not list(run_directories.iterdir())


def test_an_engine_that_cannot_start_leaves_nothing(
    model: str, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        with pytest.raises(RuntimeError, match="no-such-model"):
            async with AsyncLLMEngine(str(tmp_path / "no-such-model"), **OPTIONS):
                pass
        engine = AsyncLLMEngine(model, **OPTIONS)
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0.3)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not engine._service.run_dir.exists()

    asyncio.run(run())
    assert "no engine is left" not in capfd.readouterr().err
    with pytest.raises(TypeError, match="unknown setting 'no_such'"):
        AsyncLLMEngine(model, no_such=1)
    with pytest.raises(ValueError, match="nnodes=2: atom-launch"):
        AsyncLLMEngine(model, nnodes=2)
