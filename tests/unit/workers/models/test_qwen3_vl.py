"""Images in Qwen3-VL and Qwen3.5: logits equal transformers' ForConditionalGeneration."""

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import safetensors.torch
import torch

from atom.shared.config.model import ModelConfig
from atom.shared.messages.images import LoadImage, PromptImage
from engine_core.requests.images import row_images
from parallel.communicator import Communicator
from tests.helpers.checkpoints.tiny_models import engine_config, place
from tests.helpers.checkpoints.vision_models import MODELS, build, hf_logits, picture, processed, prompt, save
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.parallel.thread_ranks import on_ranks
from workers.checkpoint.prepare import prepare
from workers.worker import Worker

WIDE, TALL, SMALL = (processed(picture(*size)) for size in ((90, 33), (20, 70), (16, 17)))
IDS, IMAGES = prompt([5, 6, 7], WIDE, [9], TALL, SMALL, [11, 12, 13, 14, 15, 16, 17])
TOLERANCE = 3e-4
"""Experts add their products in another order than transformers."""
OF_TEXT = list(range(3, 23))

Saved = Callable[[str], tuple[torch.nn.Module, Path]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    @cache
    def make(model_type: str) -> tuple[torch.nn.Module, Path]:
        model, directory = build(model_type), tmp_path_factory.mktemp(model_type)
        save(model, directory)
        return model, directory

    return make


def load(ours: TinyWorker, images: Sequence[PromptImage]) -> None:
    for image in images:
        ours.worker.load_image(LoadImage(image.key, image.rows, image.columns, image.pixels))


def logits(directory: Path, counts: Sequence[int], tp: Communicator | None = None) -> torch.Tensor:
    return TinyWorker(directory, tp=tp).logits_of(IDS, IMAGES, counts)


@pytest.mark.parametrize("model_type", MODELS)
def test_whole_prompts_and_chunks_that_cut_images(model_type: str, saved: Saved) -> None:
    model, directory = saved(model_type)
    wanted = hf_logits(model, IDS, [WIDE, TALL, SMALL])
    for counts in ([len(IDS)], [10, 7, 30, len(IDS) - 47]):
        torch.testing.assert_close(logits(directory, counts), wanted, atol=TOLERANCE, rtol=0)


def test_experts_as_published(saved: Saved, tmp_path: Path) -> None:
    """Inputs before outputs."""
    model, directory = saved("qwen3_vl_moe")
    shutil.copytree(directory, tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = safetensors.torch.load(file.read_bytes())
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    wanted = hf_logits(model, IDS, [WIDE, TALL, SMALL])
    torch.testing.assert_close(logits(tmp_path / "model", [len(IDS)]), wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("model_type", MODELS)
def test_ranks(model_type: str, saved: Saved) -> None:
    model, directory = saved(model_type)
    wanted = hf_logits(model, IDS, [WIDE, TALL, SMALL])
    for found in on_ranks(2, lambda tp: logits(directory, [20, len(IDS) - 20], tp)):
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5"])
def test_text_beside_images_in_a_batch(model_type: str, saved: Saved) -> None:
    """Rows change between requests with images and without."""
    model, directory = saved(model_type)
    ours = TinyWorker(directory)
    load(ours, IMAGES)
    core = ours.core()
    core.add(0, IDS, images=row_images(IMAGES))
    forced_logits(ours.worker, core, 0, [len(IDS)])
    core.free(0)
    core.add(0, OF_TEXT)
    found = forced_logits(ours.worker, core, 0, [8, 12])
    torch.testing.assert_close(found, hf_logits(model, OF_TEXT, []), atol=1e-4, rtol=0)


def test_a_vision_checkpoint_as_a_text_model(saved: Saved, tmp_path: Path) -> None:
    _, directory = saved("qwen3_5")
    config = ModelConfig(model=str(directory), limit_mm_per_prompt='{"image": 0}')
    checkpoint = prepare(config, tmp_path, lambda *progress: None)
    assert checkpoint.images is None and checkpoint.no_images == "--limit-mm-per-prompt allows none"
    worker = Worker(engine_config(), checkpoint, place(), lambda *progress: None)
    assert not worker.load().image_tokens
    assert prepare(ModelConfig(model=str(directory)), tmp_path, lambda *progress: None).images is not None
