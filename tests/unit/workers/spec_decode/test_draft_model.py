"""Draft models through core and worker: they draft their own tokens, and the output is the plain run's."""

import dataclasses
from pathlib import Path

import pytest
import torch

from atom.shared.config.speculative import SpeculativeConfig
from parallel.communicator import Communicator
from parallel.expert import LocalDispatch
from parallel.mesh import Mesh
from tests.helpers.checkpoints.tiny_models import engine_config
from tests.helpers.engine.drafting import (
    REQUESTS,
    SavedPair,
    accepted_share,
    check_drafts,
    check_few_blocks,
    check_output,
    drafting_engine,
    rarely,
    saved_pairs,
    unchanging,
)
from tests.helpers.engine.varied_requests import run
from workers.rank_model import build_rank

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("llama-gqa", "gpt-oss", "deepseek-v2-lite", "mistral-window")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SavedPair]:
    return saved_pairs(FAMILIES, tmp_path_factory)


def drafted(path: str | Path, drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig("draft_model", drafts, draft_model=str(path))


@pytest.mark.parametrize(
    ("target", "draft", "ranks"),
    [
        rarely("llama-gqa", "mistral-window", 1),
        ("gpt-oss", "deepseek-v2-lite", 1),
        ("llama-gqa", "mistral-window", 2),
    ],
)
def test_drafts_are_the_draft_models_tokens(
    models: dict[str, SavedPair], target: str, draft: str, ranks: int
) -> None:
    model = models[draft]
    speculative = unchanging(drafted(model.checkpoint.directory, 3))
    made = drafting_engine(models[target].checkpoint, speculative, ranks=ranks, max_tokens=16, max_rows=2)
    check_drafts(made, model.drafts, 3)


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("llama-gqa", 2),
        *(rarely("llama-gqa", drafts) for drafts in (1, 3, 4)),
        ("gpt-oss", 3),
        rarely("deepseek-v2-lite", 3),
        rarely("mistral-window", 3),
    ],
)
def test_the_output_is_the_plain_runs(models: dict[str, SavedPair], name: str, drafts: int) -> None:
    """Greedy and sampled rows, with a draft model that is nearly the target."""
    check_output(models[name].checkpoint, drafted(models[name].noisy, drafts), least=0.2)


def test_sampled_drafts_have_the_targets_noise(models: dict[str, SavedPair]) -> None:
    """A draft model with the target's weights: nearly all drafts are right, whatever the temperature."""
    checkpoint = models["llama-gqa"].checkpoint
    made = drafting_engine(checkpoint, unchanging(drafted(checkpoint.directory, 3)))
    run(made, REQUESTS)
    assert accepted_share(made) > 0.6, "logits processors, which drafts do not have, change some tokens"


def test_preempted_and_cached_requests(models: dict[str, SavedPair]) -> None:
    saved = models["llama-gqa"]
    check_few_blocks(saved.checkpoint, unchanging(drafted(saved.noisy, 3)), blocks=24, requests=14)


def test_ranks_cannot_split_the_cache_of_any_draft_model(models: dict[str, SavedPair]) -> None:
    config = dataclasses.replace(engine_config(2), speculative=drafted(models["llama-gqa"].noisy, 2))
    ranks = Communicator(0, 2)
    mesh = Mesh(torch.device("cpu"), tp=ranks, dcp=ranks)
    with pytest.raises(ValueError, match="--draft-model .* has layers without MLA"):
        build_rank(config, models["deepseek-v2-lite"].checkpoint, mesh, LocalDispatch())
