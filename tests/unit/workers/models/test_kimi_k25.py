"""Kimi-K2.5 as published: DeepSeek V3's architecture inside of a multimodal checkpoint, and its images."""

import re
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import vision_models
from tests.helpers.checkpoints.multimodal import save_multimodal
from tests.helpers.checkpoints.tiny_models import hf_logits, prompt_of, tiny
from tests.helpers.checkpoints.vision_models import as_moonshot_publishes, build, picture, processed, save
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.parallel.thread_ranks import on_ranks

IDS = prompt_of(40, seed=3)
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "pos_emb_height": 2,
    "pos_emb_width": 2,
    "patch_size": 2,
}
SHOWN = [processed(picture(*size), "kimi_k25") for size in ((90, 33), (20, 70), (24, 24))]
PROMPT, IMAGES = vision_models.prompt([5, 6, 7], SHOWN[0], [9], *SHOWN[1:], [11, 12, 13, 14, 15, 16, 17])
"""The last image has the size of the learned grid of positions."""


def test_the_text_model_of_a_multimodal_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = save_multimodal(tiny("deepseek-v3"), "kimi_k25", VISION, tmp_path)
    as_moonshot_publishes(tmp_path)
    with caplog.at_level("INFO", "atom"):
        ours = TinyWorker(tmp_path)
    core = ours.core()
    core.add(0, IDS)
    found = forced_logits(ours.worker, core, 0, [25, 15])
    torch.testing.assert_close(found, hf_logits(reference, IDS), atol=1e-4, rtol=0)
    assert re.search(r"not loaded: \d+, as model\.visual\.\*", caplog.text)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    model, directory = build("kimi_k25"), tmp_path_factory.mktemp("kimi")
    save(model, directory)
    return model, directory


def test_images_in_whole_prompts_and_chunks_that_cut_them(saved: tuple[torch.nn.Module, Path]) -> None:
    model, directory = saved
    wanted = vision_models.hf_logits(model, PROMPT, SHOWN)
    for counts in ([len(PROMPT)], [10, 7, 30, len(PROMPT) - 47]):
        found = TinyWorker(directory).logits_of(PROMPT, IMAGES, counts)
        torch.testing.assert_close(found, wanted, atol=3e-4, rtol=0)


def test_images_on_ranks(saved: tuple[torch.nn.Module, Path]) -> None:
    model, directory = saved
    wanted = vision_models.hf_logits(model, PROMPT, SHOWN)
    counts = [20, len(PROMPT) - 20]
    for found in on_ranks(2, lambda tp: TinyWorker(directory, tp=tp).logits_of(PROMPT, IMAGES, counts)):
        torch.testing.assert_close(found, wanted, atol=3e-4, rtol=0)
