"""Checkpoints in blocks of FP8, compared with transformers on the dequantized numbers."""

from pathlib import Path

import pytest
import torch

from parallel.communicator import Communicator
from tests.helpers.fp8 import FP8_MODELS, save_fp8
from tests.helpers.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.thread_ranks import on_ranks
from tests.helpers.tiny_models import Tiny, hf_logits, prompt_of

IDS = prompt_of(48, seed=4)


def logits_of(directory: Path, size: int) -> list[torch.Tensor]:
    """Logits [T, V] on each rank, in two chunks."""

    def run(tp: Communicator) -> torch.Tensor:
        ours = TinyWorker(directory, tp=tp)
        core = ours.core()
        core.add(0, IDS)
        return forced_logits(ours.worker, core, 0, [30, 18])

    return on_ranks(size, run)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("model", FP8_MODELS, ids=lambda model: model.name)
def test_logits_equal_those_of_the_dequantized_numbers(tmp_path: Path, model: Tiny, size: int) -> None:
    expected = hf_logits(save_fp8(model, tmp_path), IDS)
    assert expected.std() > 0.5
    for found in logits_of(tmp_path, size):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
