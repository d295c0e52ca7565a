"""EAGLE-3 heads through core and worker: the drafts by definition, and the output of the plain run."""

from typing import Any

import pytest

from atom.shared.config.speculative import SpeculativeConfig
from tests.helpers.checkpoints.eagle3_models import Eagle3Model, save_eagle3_model
from tests.helpers.checkpoints.tiny_models import tiny
from tests.helpers.engine.drafting import (
    check_drafts,
    check_few_blocks,
    check_output,
    drafting_engine,
    rarely,
    unchanging,
)

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "small-vocabulary": ("llama-gqa", {"draft_vocab": 140}),
    "moe-own-embedding": (
        "qwen3-moe",
        {"own_embedding": True, "layer": "layers.0", "eagle_aux_hidden_state_layer_ids": [0, 2, 1]},
    ),
    "fc-norm": ("deepseek-v3", {"latent": True, "fc_norm": True, "norm_output": True}),
    "speculators": (
        "llama-gqa",
        {"speculators": True, "layer": "layers.0", "norm_before_fc": True, "draft_vocab": 150},
    ),
    "normed": ("deepseek-v3", {"norm_output": True, "norm_before_residual": True, "draft_vocab": 150}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Eagle3Model]:
    return {
        kind: save_eagle3_model(
            tiny(name), tmp_path_factory.mktemp(kind), tmp_path_factory.mktemp(f"{kind}-head"), **config
        )
        for kind, (name, config) in KINDS.items()
    }


def eagle3(model: Eagle3Model, drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig("eagle3", drafts, draft_model=str(model.head))


@pytest.mark.parametrize(
    "kind", [rarely("small-vocabulary"), "moe-own-embedding", "normed", "fc-norm", "speculators"]
)
def test_drafts_are_those_of_the_definition(models: dict[str, Eagle3Model], kind: str) -> None:
    model = models[kind]
    made = drafting_engine(model.checkpoint, unchanging(eagle3(model, 4)), max_tokens=16, max_rows=2)
    steps = check_drafts(made, model.drafts, 4)
    assert steps < 23, "no draft was accepted"


@pytest.mark.parametrize(
    ("kind", "drafts"),
    [
        ("small-vocabulary", 3),
        *(rarely("small-vocabulary", drafts) for drafts in (1, 2, 4)),
        rarely("moe-own-embedding", 3),
        ("normed", 1),
        rarely("normed", 3),
        ("fc-norm", 2),
        rarely("speculators", 2),
    ],
)
def test_the_output_is_the_plain_runs(models: dict[str, Eagle3Model], kind: str, drafts: int) -> None:
    check_output(models[kind].checkpoint, eagle3(models[kind], drafts), least=0.05)


@pytest.mark.parametrize("kind", ["small-vocabulary", "fc-norm"])
def test_two_ranks_draft_the_same(models: dict[str, Eagle3Model], kind: str) -> None:
    model = models[kind]
    speculative = unchanging(eagle3(model, 4))
    made = drafting_engine(model.checkpoint, speculative, ranks=2, max_tokens=16, max_rows=2)
    assert check_drafts(made, model.drafts, 4) < 23


@pytest.mark.models
@pytest.mark.parametrize("kind", ["small-vocabulary", "fc-norm"])
def test_preempted_and_cached_requests(models: dict[str, Eagle3Model], kind: str) -> None:
    model = models[kind]
    check_few_blocks(model.checkpoint, unchanging(eagle3(model, 3)), blocks=36, requests=30)
