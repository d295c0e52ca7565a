"""Images in Gemma 3: logits equal transformers' Gemma3ForConditionalGeneration."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch

from parallel.communicator import Communicator
from tests.helpers.checkpoints.vision_models import build, hf_logits, picture, processed, prompt, save
from tests.helpers.engine.teacher_forcing import TinyWorker
from tests.helpers.parallel.thread_ranks import on_ranks

WIDE, TALL = (processed(picture(*size), "gemma3") for size in ((90, 33), (20, 70)))
SHOWN = [WIDE, TALL, WIDE]
IDS, IMAGES = prompt([5, 6, 7], WIDE, [9], TALL, WIDE, [11, 12, 13, 14, 15, 16, 17])
BORDERS = [0, 3, 4, 22, 41, 57, 60, len(IDS)]
"""Not within an image; some next to one."""
TOLERANCE = 1e-4

Saved = tuple[torch.nn.Module, Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    model, directory = build("gemma3"), tmp_path_factory.mktemp("gemma3")
    save(model, directory)
    return model, directory


def logits(directory: Path, counts: Sequence[int], tp: Communicator | None = None) -> torch.Tensor:
    return TinyWorker(directory, tp=tp).logits_of(IDS, IMAGES, counts)


@pytest.mark.parametrize("borders", [[0, len(IDS)], BORDERS])
def test_whole_prompts_and_chunks(borders: list[int], saved: Saved) -> None:
    model, directory = saved
    counts = [end - start for start, end in pairwise(borders)]
    found = logits(directory, counts)
    torch.testing.assert_close(found, hf_logits(model, IDS, SHOWN), atol=TOLERANCE, rtol=0)


def test_ranks(saved: Saved) -> None:
    model, directory = saved
    wanted = hf_logits(model, IDS, SHOWN)
    for found in on_ranks(2, lambda tp: logits(directory, [22, len(IDS) - 22], tp)):
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


def test_a_chunk_that_cuts_an_image_is_refused(saved: Saved) -> None:
    with pytest.raises(ValueError, match="cuts its image at 4 to 20"):
        logits(saved[1], [10, len(IDS) - 10])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("vision_tower.", "vision_tower.vision_model."),
        ("vision_tower.", "model.vision_tower.vision_model."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
)
def test_names_of_other_releases(ours: str, theirs: str, saved: Saved, tmp_path: Path) -> None:
    model, directory = saved
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load(file.read_bytes())
    assert any(name.startswith(ours) for name in tensors)
    renamed = {
        theirs + name.removeprefix(ours) if name.startswith(ours) else name: tensor
        for name, tensor in tensors.items()
    }
    safetensors.torch.save_file(renamed, file, metadata={"format": "pt"})
    found = logits(tmp_path, [len(IDS)])
    torch.testing.assert_close(found, hf_logits(model, IDS, SHOWN), atol=TOLERANCE, rtol=0)
