"""A server whose two engines share experts: answers, idle cost, and the end of both with one worker."""

import asyncio
import os
import re
import signal
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.helpers.servers.random_server import ARGS, MODEL_NAME, Crowd, abort_all, write_checkpoint
from tests.helpers.servers.server import Server, running_server

pytestmark = pytest.mark.timeout(240)

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
ENDS_WITHIN_S = 30.0
"""Half of the time after which a worker that shares nothing counts as hung."""
DEADLINE_S = 100.0
_IDLE_S = 3.0


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("moe") / "model", **MOE)


async def completion(server: Server, rank: int) -> str:
    body = {"model": MODEL_NAME, "prompt": "count", "max_tokens": 24, "temperature": 0}
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with (
        aiohttp.ClientSession(server.url, timeout=timeout) as session,
        session.post("/v1/completions", json=body | {"data_parallel_rank": rank}) as answer,
    ):
        found = await answer.json()
        assert answer.status == 200, found
        text: str = found["choices"][0]["text"]
        return text


async def until_ready(server: Server) -> None:
    """Returns once both engines are."""
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(server.url) as session:
        while True:
            async with session.get("/metrics") as answer:
                up = re.findall("^atom:engine_up.* 1.0$", await answer.text(), re.MULTILINE)
                if len(up) == 2:
                    return
            await asyncio.sleep(0.1)


def workers(server: Server) -> list[int]:
    return [pid for pid, line in server.children().items() if "workers.main" in line]


def busy_seconds(pids: list[int]) -> list[float]:
    return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]


def test_engines_that_share_experts_are_one_domain(moe_model: Path, tmp_path: Path) -> None:
    admin = tmp_path / "admin"

    async def drive(server: Server) -> None:
        await until_ready(server)
        alone = [await completion(server, rank) for rank in (0, 1)]  # the other engine is idle
        assert alone[0] == alone[1] == (await asyncio.gather(completion(server, 0), completion(server, 1)))[1]
        pids = workers(server)
        before = busy_seconds(pids)
        await asyncio.sleep(_IDLE_S)
        used = [after - begun for after, begun in zip(busy_seconds(pids), before, strict=True)]
        assert max(used) < 0.02 * _IDLE_S, "idle workers sleep"
        crowd = Crowd(2)
        async with crowd.streaming(server):
            os.kill(pids[1], signal.SIGSTOP)
            ended_s = await asyncio.to_thread(server.until, "engines 0 to 1, life 0, has ended")
            await crowd.go_on()
            await abort_all(admin)
        assert ended_s < ENDS_WITHIN_S
        assert crowd.ends == {"finished": 2}
        await until_ready(server)
        assert await completion(server, 1) == alone[0]
        os.kill(workers(server)[0], signal.SIGKILL)
        ended_s = await asyncio.to_thread(server.until, "engines 0 to 1, life 1, has ended")
        assert ended_s < ENDS_WITHIN_S

    arguments = ("--model", str(moe_model), *ARGS, "-dp", "2", "--enable-expert-parallel")
    arguments += ("--admin-socket", str(admin))
    with running_server(*arguments) as server:
        asyncio.run(drive(server))
        server.until("2 engines of 1 x cpu, experts spread over 2 workers")
        stopped = r"engine \d core: worker 0 has not responded for \d+ s; life 1 starts"
        server.until(stopped)
        server.until(r"engine \d worker 0: killed by SIGKILL")
        assert server.terminate() == 0
