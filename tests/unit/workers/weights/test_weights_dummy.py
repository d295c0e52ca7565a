"""--load-dummy in every family: only config.json is needed, and activations keep their scale."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from atom.shared.messages.worker import AllocateKV
from tests.helpers.checkpoints.rows import FIRST_OF_FAMILIES
from tests.helpers.checkpoints.tiny_models import (
    MAX_MODEL_LEN,
    Tiny,
    checkpoint_of,
    engine_config,
    place,
    prompt_of,
    save_tiny,
    tiny,
)
from tests.helpers.engine.core_side import CoreSide
from tests.helpers.engine.teacher_forcing import step_logits
from workers.layers.moe.moe import ExpertRouter
from workers.worker import Worker

BLOCKS, BLOCK_SIZE, TOKENS = 64, 4, 96
EXPERTS, CHOSEN, LAYERS = 32, 4, 16
ALIKE = ("olmo2", "olmo3", "smollm3")
"""Norms after blocks, or a tied LM head, keep outputs of layers large; they have no experts to route to."""


def logits_of(model: Tiny, directory: Path, changes: dict[str, Any] | None = None) -> torch.Tensor:
    """Logits [T, V] of a prompt, from a directory with only config.json, with `changes`."""
    save_tiny(model, directory)
    for path in [path for path in directory.iterdir() if path.name != "config.json"]:
        path.unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | (changes or {})))
    worker = Worker(engine_config(load_dummy=True), checkpoint_of(directory), place(), lambda *progress: None)
    specs = worker.load().kv_specs
    worker.allocate(AllocateKV([BLOCKS] * len(specs), MAX_MODEL_LEN))
    core = CoreSide.of_specs(specs, BLOCKS, BLOCK_SIZE, seed=3)
    core.add(0, prompt_of(TOKENS, seed=1))
    return step_logits(worker, core.plan({0: TOKENS}))


@pytest.mark.parametrize("name", FIRST_OF_FAMILIES)
def test_dummy_weights_need_only_the_configuration(name: str, tmp_path: Path) -> None:
    logits_TV = logits_of(tiny(name), tmp_path)
    assert 0.8 < logits_TV.std() < 1.25
    if name not in ALIKE:  # no token is likely regardless of its context
        assert logits_TV.mean(0).std() < 0.3 * logits_TV.std()


def test_dummy_mxfp4_experts_keep_the_scale_of_activations(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    packed = {"quantization_config": {"quant_method": "mxfp4"}}
    logits_TV = logits_of(tiny("gpt-oss"), tmp_path, sizes | packed)
    assert 0.8 < logits_TV.std() < 1.25


def test_tokens_stay_distinct_in_deep_models_and_use_all_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.Tensor] = []
    select = ExpertRouter.select_experts

    def recorded(router: ExpertRouter, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = select(router, *inputs)
        chosen.append(found[0])
        return found

    monkeypatch.setattr(ExpertRouter, "select_experts", recorded)
    mixture = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 24}
    logits_of(Tiny("deep", "qwen3_moe", 1, {**mixture, "num_hidden_layers": LAYERS}), tmp_path)
    for ids_TJ in chosen[-LAYERS:]:
        share = ids_TJ.flatten().bincount(minlength=EXPERTS) / ids_TJ.numel() * EXPERTS
        assert share.min() > 0.1 and share.max() < 3
