"""Checkpoints in 4-bit layouts, compared with transformers on the dequantized numbers."""

from pathlib import Path

import pytest
import torch

from parallel.communicator import Communicator
from tests.helpers.four_bits import MODELS, Layout, awq, compressed, gptq, mxfp4, quark, save_four_bits
from tests.helpers.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.thread_ranks import on_ranks
from tests.helpers.tiny_models import Tiny, hf_logits, prompt_of

IDS = prompt_of(24, seed=4)
LLAMA, QWEN3_MOE, DEEPSEEK_V3 = MODELS.values()
ROWS = [
    (LLAMA, awq(32)),
    (LLAMA, gptq(64, symmetric=False)),
    (LLAMA, gptq(32, act_order=True)),
    (LLAMA, gptq(-1, act_order=True, v2=True)),
    (LLAMA, compressed(64)),
    (LLAMA, compressed(None, symmetric=False)),
    (LLAMA, quark(reordered=True, signed=True)),
    (LLAMA, mxfp4("compressed-tensors")),
    (QWEN3_MOE, awq(32)),
    (QWEN3_MOE, gptq(32, v2=True)),
    (QWEN3_MOE, compressed(32, symmetric=False)),
    (QWEN3_MOE, quark(reordered=False, signed=False)),
    (QWEN3_MOE, mxfp4("quark")),
    (DEEPSEEK_V3, awq(32)),
    (DEEPSEEK_V3, compressed(32, routed=True)),
    (DEEPSEEK_V3, mxfp4("quark")),
]


def run_on_ranks(directory: Path, size: int, expert_parallel: bool = False) -> list[torch.Tensor]:
    """Logits [T, V] in two chunks on each rank."""

    def run(tp: Communicator) -> torch.Tensor:
        ours = TinyWorker(directory, tp=tp, expert_parallel=expert_parallel)
        core = ours.core()
        core.add(0, IDS)
        return forced_logits(ours.worker, core, 0, [14, 10])

    return on_ranks(size, run)


@pytest.mark.parametrize(("model", "layout"), ROWS, ids=[f"{row[0].name}-{row[1].name}" for row in ROWS])
def test_logits_equal_those_of_the_dequantized_numbers(tmp_path: Path, model: Tiny, layout: Layout) -> None:
    expected = hf_logits(save_four_bits(model, layout, tmp_path), IDS)
    assert expected.std() > 0.5
    for size in (1, 2):
        for found in run_on_ranks(tmp_path, size):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
