"""Each switch of a fusion changes the kernels that a GPU runs, and no token."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from atom.shared.messages.engine import unpack_ids
from atom.shared.messages.worker import AllocateKV
from atom_ops import backend
from parallel.mesh import Mesh
from tests.gpu.test_step_graphs import BLOCK_SIZE, BLOCKS, config
from tests.helpers.checkpoints.fp8 import FP8_MODELS, save_fp8
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, checkpoint_of, prompt_of
from tests.helpers.engine.core_side import CoreSide
from workers.worker import Worker

GPU = torch.device("cuda", 0)
LLAMA = "ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED"
QWEN, DEEPSEEK = FP8_MODELS[0], FP8_MODELS[2]
TINY_LLAMA = replace(
    QWEN, name="llama", model_type="llama", config=QWEN.config | {"hidden_size": 256, "num_hidden_layers": 2}
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def resolved_again() -> Iterator[None]:
    yield
    backend.resolve(torch.device("cpu"))


def run(directory: Path) -> tuple[list[int], Counter[str]]:
    """Sampled ids of a prompt and of decode steps, and how often each kernel ran."""
    made = Worker(config("[]"), checkpoint_of(directory), Mesh(GPU), lambda *progress: None)
    specs = made.load().kv_specs
    made.allocate(AllocateKV([BLOCKS] * len(specs), MAX_MODEL_LEN))
    core = CoreSide.of_specs(specs, BLOCKS, BLOCK_SIZE, seed=3)
    core.add(0, prompt_of(40, seed=3))
    found: list[int] = []
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for count in (40, *[1] * 12):
            ids = made.execute(core.plan({0: count})).result().token_ids
            core.add_sampled(ids)
            found += unpack_ids(ids)
    kernels = (one for one in trace.events() if one.device_type.name == "CUDA")
    return found, Counter(one.key for one in kernels if not one.key.startswith("Mem"))


@pytest.mark.parametrize(
    ("model", "switch"),
    [
        (TINY_LLAMA, f"{LLAMA}_RMSNORM_QUANT"),
        (TINY_LLAMA, f"{LLAMA}_SILU_MUL_QUANT"),
        (DEEPSEEK, "ATOM_ENABLE_DS_INPUT_RMSNORM_QUANT_FUSION"),
        (DEEPSEEK, "ATOM_ENABLE_DS_QKNORM_FUSION"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_switch_changes_kernels_and_no_token(
    model: object, switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(model, type(QWEN))
    save_fp8(model, tmp_path)
    wanted, together = run(tmp_path)
    monkeypatch.setenv(switch, "0")
    found, apart = run(tmp_path)
    assert found == wanted
    print(
        {name: (together[name], apart[name]) for name in {*together, *apart} if together[name] != apart[name]}
    )
    assert sum(apart.values()) > sum(together.values()), "as many kernels without the fusion"
    assert {name for name in apart if apart[name] > together[name]}
