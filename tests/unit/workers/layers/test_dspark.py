"""DSpark drafters through core and worker: the drafts by definition, and the output of the plain run."""

from functools import partial

import pytest

from atom.shared.config.speculative import SpeculativeConfig
from tests.helpers.checkpoints.dspark_models import DsparkModel, save_dspark_model
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

KINDS = {"copies": ("llama-gqa", True), "shared": ("llama-gqa", False), "moe": ("qwen3-moe", True)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DsparkModel]:
    folder = tmp_path_factory.mktemp
    return {
        kind: save_dspark_model(tiny(name), folder(kind), folder(f"{kind}-drafter"), copies)
        for kind, (name, copies) in KINDS.items()
    }


def dspark(model: DsparkModel, drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig("dspark", drafts, draft_model=str(model.drafter))


@pytest.mark.parametrize(
    ("kind", "drafts", "ranks"),
    [("copies", 4, 2), ("shared", 7, 1), rarely("copies", 1, 1), rarely("moe", 3, 1)],
)
def test_drafts_are_those_of_the_definition(
    models: dict[str, DsparkModel], kind: str, drafts: int, ranks: int
) -> None:
    model = models[kind]
    speculative = unchanging(dspark(model, drafts))
    made = drafting_engine(model.checkpoint, speculative, ranks=ranks, max_tokens=16, max_rows=2)
    wanted = partial(model.drafts_of, most=drafts)
    assert check_drafts(made, wanted, drafts) < 20, "no draft was accepted"


@pytest.mark.parametrize(
    ("kind", "drafts"),
    [
        ("copies", 3),
        *(rarely("copies", drafts) for drafts in (1, 2, 4, 7)),
        rarely("shared", 3),
        rarely("moe", 3),
    ],
)
def test_the_output_is_the_plain_runs(models: dict[str, DsparkModel], kind: str, drafts: int) -> None:
    check_output(models[kind].checkpoint, dspark(models[kind], drafts), least=0.2)


def test_preempted_and_cached_requests(models: dict[str, DsparkModel]) -> None:
    model = models["copies"]
    check_few_blocks(model.checkpoint, dspark(model, 3), blocks=24, requests=14)
