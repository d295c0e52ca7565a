"""Shared experts next to the routed ones: the same tokens, two streams up to the threshold, one beyond."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from atom.shared.messages.worker import AllocateKV
from atom_ops import backend
from parallel.mesh import Mesh
from tests.gpu.test_step_graphs import BLOCK_SIZE, BLOCKS, config
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import GREEDY, CoreSide, generate
from workers.worker import Worker

GPU = torch.device("cuda", 0)
THRESHOLD = "ATOM_DUAL_STREAM_MOE_TOKEN_THRESHOLD"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(params=["deepseek-v3", "glm4-moe", "qwen3-next"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], tuple[Worker, CoreSide]]:
    checkpoint = save_tiny(tiny(request.param), tmp_path)[1]

    def worker(sizes: str) -> tuple[Worker, CoreSide]:
        found = Worker(config(sizes, "float32"), checkpoint, Mesh(GPU), lambda *progress: None)
        specs = found.load().kv_specs
        found.allocate(AllocateKV([BLOCKS] * len(specs), MAX_MODEL_LEN))
        return found, CoreSide.of_specs(specs, BLOCKS, BLOCK_SIZE, seed=3)

    return worker


@pytest.fixture(autouse=True)
def resolved_again() -> Iterator[None]:
    yield
    backend.resolve(torch.device("cpu"))


def test_the_tokens_stay_the_same(
    made: Callable[[str], tuple[Worker, CoreSide]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(3 + 5 * row, seed=row) for row in range(6)]

    def tokens(threshold: str, sizes: str) -> list[list[int]]:
        monkeypatch.setenv(THRESHOLD, threshold)
        worker, core = made(sizes)
        return generate(
            core, lambda batch: worker.execute(batch).result().token_ids, prompts, 40, 16, 3, GREEDY
        )

    wanted = tokens("0", "[]")
    for sizes in ("[]", "[2,6]"):
        assert tokens("1024", sizes) == wanted


def test_the_threshold_decides_the_stream(
    made: Callable[[str], tuple[Worker, CoreSide]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(THRESHOLD, "8")
    worker, core = made("[]")
    for row, tokens in enumerate((8, 9)):
        core.add(row, prompt_of(tokens, seed=row))
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
            worker.execute(core.plan({row: tokens})).result()
        on_device = [one for one in trace.events() if one.device_type.name == "CUDA"]
        streams = {one.device_resource_id for one in on_device if not one.key.startswith("Mem")}
        assert len(streams) == (2 if tokens <= 8 else 1)
