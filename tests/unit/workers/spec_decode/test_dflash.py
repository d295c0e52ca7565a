"""Block drafters through core and worker: the drafts by definition, and the output of the plain run."""

import pytest

from atom.shared.config.speculative import SpeculativeConfig
from tests.helpers.checkpoints.dflash_models import DflashModel, save_dflash_model
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
    made = drafting_engine(model.checkpoint, speculative, ranks=ranks, max_tokens=16, max_rows=2)
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
    check_output(models[name].checkpoint, dflash(models[name], drafts), least=0.02)


def test_preempted_and_cached_requests(models: dict[str, DflashModel]) -> None:
    model = models["llama-gqa"]
    check_few_blocks(model.checkpoint, dflash(model, 3), blocks=24, requests=14)
