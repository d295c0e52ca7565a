"""DSpark drafters through core and worker: the drafts by definition, and the output of the plain run."""

import dataclasses
import json
from functools import partial
from typing import Any

import pytest

from atom.shared.config.speculative import SpeculativeConfig
from tests.helpers.drafting import (
    PLAIN,
    REQUESTS,
    accepted_share,
    check_drafts,
    drafting_engine,
    rarely,
    unchanging,
)
from tests.helpers.dspark_models import DsparkModel, save_dspark_model
from tests.helpers.tiny_models import engine_config, place, tiny
from tests.unit.workers.spec_decode.test_ngram import check, run
from workers.worker import Worker

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
    made = drafting_engine(model.checkpoint, speculative, 2, ranks=ranks, max_tokens=16, max_rows=2)
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
    model = models[kind]
    wanted = run(drafting_engine(model.checkpoint, PLAIN), REQUESTS)
    made = drafting_engine(model.checkpoint, unchanging(dspark(model, drafts)), 2)
    check(run(made, REQUESTS), wanted)
    assert accepted_share(made) > 0.2


def test_preempted_and_cached_requests(models: dict[str, DsparkModel]) -> None:
    """With few blocks, requests are preempted and prompts come from the prefix cache; drafts adapt."""
    model = models["copies"]
    wanted = run(drafting_engine(model.checkpoint, PLAIN), 14)
    made = drafting_engine(model.checkpoint, dspark(model, 3), 2, blocks=24)
    check(run(made, 14), wanted)
    stats = made.core.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, "architecture Gemma4DSparkModel"),
        ({"model_type": "qwen3_5"}, "model_type 'qwen3_5'"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type"),
        ({"markov_head_type": "rnn"}, "markov_head_type 'rnn'"),
        ({"markov_rank": 0}, "markov_rank 0"),
        ({"sample_from_anchor": False}, "sample_from_anchor False"),
        ({"dflash_config": {"shift_label": False}}, "shift_label False"),
        ({"draft_vocab_size": 100}, "draft_vocab_size 100"),
        ({"block_size": 3}, "at most 3 drafts"),
    ],
)
def test_drafters_that_are_not_supported(
    models: dict[str, DsparkModel],
    tmp_path_factory: pytest.TempPathFactory,
    changes: dict[str, Any],
    message: str,
) -> None:
    model = models["copies"]
    other = tmp_path_factory.mktemp("other")
    (other / "config.json").write_text(json.dumps(model.config | changes))
    (other / "model.safetensors").write_bytes((model.drafter / "model.safetensors").read_bytes())
    speculative = SpeculativeConfig("dspark", 4, draft_model=str(other))
    config = dataclasses.replace(engine_config(), speculative=speculative)
    with pytest.raises(ValueError, match=message):
        Worker(config, model.checkpoint, place(), lambda *progress: None).load()
