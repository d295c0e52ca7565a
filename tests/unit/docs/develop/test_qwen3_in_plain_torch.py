"""The readable Qwen3 computes what transformers computes."""

import pytest
import torch

from docs.develop.qwen3_in_plain_torch import logits
from tests.helpers.checkpoints.tiny_models import build_tiny, prompt_of, tiny


@pytest.mark.parametrize("name", ["qwen3", "qwen3-mha-tied-wide-heads"])
def test_its_logits_are_those_of_transformers(name: str) -> None:
    model = build_tiny(tiny(name))
    ids = torch.tensor(prompt_of(40, seed=3))
    with torch.inference_mode():
        wanted = model(ids[None]).logits[0]
        found = logits(ids, model.state_dict(), model.config.to_dict())
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    assert wanted.std() > 0.5, "the logits differ clearly"
