"""Changing any kind of tensor changes the logits of every family as it does in transformers.

One tensor of each kind is changed in the checkpoint. Tensors whose names differ only in numbers are
one kind.
"""

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.checkpoints.reference import TOLERANCE
from tests.helpers.checkpoints.rows import ON_TWO_RANKS, model_rows
from tests.helpers.checkpoints.tiny_models import hf_logits, prompt_of, save_tiny, tiny
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits

IDS = prompt_of(64, seed=9)
CHANGE = 0.3
LEAST_EFFECT = 100 * TOLERANCE

Tensors = dict[str, torch.Tensor]


def kinds(names: list[str]) -> dict[str, str]:
    """Each kind, and the tensor that is changed: the middle one of its kind."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    return {kind: sorted(found)[len(found) // 2] for kind, found in alike.items()}


def ours(directory: Path) -> torch.Tensor:
    """Logits [T, V] of our worker."""
    tiny_worker = TinyWorker(directory)
    core = tiny_worker.core()
    core.add(0, IDS)
    return forced_logits(tiny_worker.worker, core, 0, [len(IDS)])


def theirs(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return hf_logits(model, IDS)


def changed(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():  # experts by token id
        return (tensor + 1) % (tensor.max() + 1)
    generator = torch.Generator().manual_seed(0)
    return tensor + CHANGE * torch.randn(tensor.shape, generator=generator)


@pytest.mark.proves("tensors")
@pytest.mark.parametrize("name", model_rows([ON_TWO_RANKS]))
def test_every_kind_of_tensor_has_an_effect(name: str, tmp_path: Path) -> None:
    save_tiny(tiny(name), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    whole: Tensors = safetensors.torch.load(file.read_bytes())
    before = ours(tmp_path)
    torch.testing.assert_close(before, theirs(tmp_path), atol=TOLERANCE, rtol=0)
    for kind, changes in kinds(list(whole)).items():
        if kind.endswith("k_proj.bias") and tiny(name).config.get("position_embedding_type") == "nope":
            continue  # it adds one number to all scores of a query, which the softmax cancels
        tensors = whole | {changes: changed(whole[changes])}
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
        found = ours(tmp_path)
        assert (found - before).abs().max() > LEAST_EFFECT, f"{kind} has no effect"
        torch.testing.assert_close(
            found, theirs(tmp_path), atol=2 * TOLERANCE, rtol=0, msg=lambda text, k=kind: f"{k}: {text}"
        )
