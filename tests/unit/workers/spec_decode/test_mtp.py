"""Multi-token prediction through core and worker: the drafts by definition, the output of the plain run."""

import pytest

from atom.shared.config.speculative import SpeculativeConfig
from tests.helpers.checkpoints.mtp_models import (
    DELTA_FAMILIES,
    MtpModel,
    save_mtp_model_of,
)
from tests.helpers.checkpoints.tiny_models import save_tiny, tiny
from tests.helpers.engine.drafting import (
    REQUESTS,
    accepted_share,
    check_drafts,
    check_few_blocks,
    check_output,
    drafting_engine,
    drafting_worker,
    rarely,
    unchanging,
)
from tests.helpers.engine.varied_requests import check, run
from workers.spec_decode import adaptive

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("deepseek-v3", "glm4-moe", "deepseek-v3.2", "glm-4.7-flash", "glm-5")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MtpModel]:
    names = (*FAMILIES, *DELTA_FAMILIES, "deepseek-v4")
    return {name: save_mtp_model_of(name, tmp_path_factory.mktemp(name)) for name in names}


def mtp(drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig("mtp", drafts)


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek-v3", rarely("glm4-moe"), "deepseek-v3.2", "glm-4.7-flash", rarely("glm-5")),
        *("qwen3-next", rarely("qwen3.5"), rarely("qwen3.5-moe"), "deepseek-v4"),
    ],
)
def test_drafts_are_those_of_the_definition(models: dict[str, MtpModel], name: str) -> None:
    model = models[name]
    made = drafting_engine(model.checkpoint, unchanging(mtp(4)), max_tokens=16, max_rows=2)
    steps = check_drafts(made, model.drafts, 4)
    assert steps < 18, "no draft was accepted"


QUICK = {("deepseek-v3", 4), ("glm4-moe", 1), ("deepseek-v3.2", 3), ("qwen3-next", 3), ("deepseek-v4", 3)}


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        (name, drafts) if (name, drafts) in QUICK else rarely(name, drafts)
        for name in (*FAMILIES, *DELTA_FAMILIES, "deepseek-v4")
        for drafts in (1, 2, 3, 4)
    ],
)
def test_the_output_is_the_plain_runs(models: dict[str, MtpModel], name: str, drafts: int) -> None:
    check_output(models[name].checkpoint, mtp(drafts), least=0.05)


def test_drafts_adapt(models: dict[str, MtpModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have fewer drafts, of which more are accepted; the model as a whole is not judged here."""
    monkeypatch.setattr(adaptive, "SHORTEST_PAUSE", 4)
    monkeypatch.setattr(adaptive, "MOST_LOSS", 1e9)
    checkpoint = models["glm4-moe"].checkpoint
    always = drafting_engine(checkpoint, unchanging(mtp(4)))
    made = drafting_engine(checkpoint, mtp(4))
    check(run(made, REQUESTS), run(always, REQUESTS))
    assert made.core.stats().num_draft_tokens < 0.7 * always.core.stats().num_draft_tokens
    assert accepted_share(made) > accepted_share(always)


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v4"])
def test_two_ranks_draft_the_same(models: dict[str, MtpModel], name: str) -> None:
    model = models[name]
    made = drafting_engine(model.checkpoint, unchanging(mtp(4)), ranks=2, max_tokens=16, max_rows=2)
    assert check_drafts(made, model.drafts, 4) < 23


def test_preempted_and_cached_requests(models: dict[str, MtpModel]) -> None:
    check_few_blocks(models["glm4-moe"].checkpoint, unchanging(mtp(3)), blocks=24, requests=14)


def test_a_model_without_such_a_layer(tmp_path_factory: pytest.TempPathFactory) -> None:
    _, checkpoint = save_tiny(tiny("llama-gqa"), tmp_path_factory.mktemp("model"))
    with pytest.raises(ValueError, match="no layer for multi-token prediction"):
        drafting_worker(checkpoint, mtp(2)).load()
