"""The token of a row does not depend on the other rows."""

from pathlib import Path

import numpy as np
import torch

from atom_ops.ops.sampling.sampling import SamplingBatch
from tests.helpers.checkpoints.tiny_models import save_tiny, tiny
from tests.helpers.engine.teacher_forcing import TinyWorker
from workers.layers.embedding import LMHead

ROWS = 2000
"""Enough for some whose two best logits are equal in bfloat16."""


def batch(temperature: float) -> SamplingBatch:
    """Greedy rows, and a last one with this temperature."""
    zeros = np.zeros(ROWS, np.int64)
    return SamplingBatch.from_host(
        temperature=np.append(np.zeros(ROWS - 1, np.float32), np.float32(temperature)),
        top_k=zeros,
        top_p=np.ones(ROWS, np.float32),
        min_p=np.zeros(ROWS, np.float32),
        seed=zeros.view(np.uint64),
        sequence=zeros,
        device=torch.device("cpu"),
    )


def test_greedy_tokens_next_to_a_row_that_samples(tmp_path: Path) -> None:
    save_tiny(tiny("qwen3"), tmp_path)
    head = TinyWorker(tmp_path, "bfloat16").worker._runner._model.get_submodule("lm_head")
    assert isinstance(head, LMHead)
    hidden = torch.randn(ROWS, head.weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = torch.arange(ROWS)
    alone = head.sample(hidden, batch(0.0), positions)
    together = head.sample(hidden, batch(1.0), positions)
    assert torch.equal(alone[:-1], together[:-1])
    assert torch.equal(alone, head(hidden).argmax(-1))
