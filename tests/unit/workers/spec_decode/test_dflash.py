"""Block drafters through core and worker: the drafts by definition, and the output of the plain run."""

import dataclasses
import json
from typing import Any

import pytest

from atom.shared.config.speculative import SpeculativeConfig
from tests.helpers.dflash_models import DflashModel, save_dflash_model
from tests.helpers.drafting import (
    PLAIN,
    REQUESTS,
    accepted_share,
    check_drafts,
    drafting_engine,
    rarely,
    unchanging,
)
from tests.helpers.tiny_models import engine_config, place, tiny
from tests.unit.workers.spec_decode.test_ngram import check, run
from workers.worker import Worker

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("llama-gqa", "qwen3-moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DflashModel]:
    return {
        name: save_dflash_model(
            tiny(name), tmp_path_factory.mktemp(name), tmp_path_factory.mktemp(f"{name}-drafter")
        )
        for name in FAMILIES
    }


def dflash(model: DflashModel, drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig("dflash", drafts, draft_model=str(model.drafter))


@pytest.mark.parametrize("ranks", [1, 2])
def test_drafts_are_those_of_the_definition(models: dict[str, DflashModel], ranks: int) -> None:
    model = models["llama-gqa"]
    speculative = unchanging(dflash(model, 4))
    made = drafting_engine(model.checkpoint, speculative, 2, ranks=ranks, max_tokens=16, max_rows=2)
    assert check_drafts(made, model.drafts, 4) < 23, "no draft was accepted"


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("llama-gqa", 3),
        *(rarely("llama-gqa", drafts) for drafts in (1, 2, 7)),
        rarely("qwen3-moe", 3),
    ],
)
def test_the_output_is_the_plain_runs(models: dict[str, DflashModel], name: str, drafts: int) -> None:
    model = models[name]
    wanted = run(drafting_engine(model.checkpoint, PLAIN), REQUESTS)
    made = drafting_engine(model.checkpoint, unchanging(dflash(model, drafts)), 2)
    check(run(made, REQUESTS), wanted)
    assert accepted_share(made) > 0.02


def test_preempted_and_cached_requests(models: dict[str, DflashModel]) -> None:
    """With few blocks, requests are preempted and prompts come from the prefix cache; drafts adapt."""
    model = models["llama-gqa"]
    wanted = run(drafting_engine(model.checkpoint, PLAIN), 14)
    made = drafting_engine(model.checkpoint, dflash(model, 3), 2, blocks=24)
    check(run(made, 14), wanted)
    stats = made.core.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0


@pytest.mark.parametrize(
    ("changes", "own", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, {}, "architecture DFlash2DraftModel"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, {}, "sliding_attention"),
        ({"hidden_size": 64}, {}, "hidden size 64"),
        ({"block_size": 4}, {}, "at most 3 drafts"),
        ({}, {"fc_layernorm": True}, "fc_layernorm"),
        ({}, {"target_layer_ids": [0, 2]}, "distinct layers below the last"),
        ({}, {"mask_token_id": 160}, "outside the vocabulary"),
        ({}, {"mask_token_id": None}, "lacks 'mask_token_id'"),
    ],
)
def test_drafters_that_are_not_supported(
    models: dict[str, DflashModel],
    tmp_path_factory: pytest.TempPathFactory,
    changes: dict[str, Any],
    own: dict[str, Any],
    message: str,
) -> None:
    model = models["llama-gqa"]
    other = tmp_path_factory.mktemp("other")
    inner = {
        name: value for name, value in (model.config["dflash_config"] | own).items() if value is not None
    }
    (other / "config.json").write_text(json.dumps(model.config | changes | {"dflash_config": inner}))
    (other / "model.safetensors").write_bytes((model.drafter / "model.safetensors").read_bytes())
    speculative = SpeculativeConfig("dflash", 4, draft_model=str(other))
    config = dataclasses.replace(engine_config(), speculative=speculative)
    with pytest.raises(ValueError, match=message):
        Worker(config, model.checkpoint, place(), lambda *progress: None).load()
