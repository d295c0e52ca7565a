"""Block drafters through core and worker: the drafts by definition, and the output of the plain run."""

from typing import Any

import pytest
import torch

from atom.shared.config.speculative import SpeculativeConfig
from tests.helpers.checkpoints.dflash_models import VARIANTS, DflashModel, save_dflash_model
from tests.helpers.checkpoints.tiny_models import prompt_of, tiny
from tests.helpers.engine.drafting import (
    check_drafts,
    check_few_blocks,
    check_output,
    drafting_engine,
    rarely,
    unchanging,
)
from workers.spec_decode.dflash import HiddenStatesBlockDrafter

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("llama-gqa", "qwen3-moe")


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DflashModel]:
    return {
        kind: save_dflash_model(
            tiny("llama-gqa"), tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("drafter"), fields
        )
        for kind, fields in VARIANTS.items()
    }


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


@pytest.mark.parametrize("kind", VARIANTS)
def test_drafts_of_variants_are_those_of_the_definition(variants: dict[str, DflashModel], kind: str) -> None:
    model = variants[kind]
    made = drafting_engine(model.checkpoint, unchanging(dflash(model, 4)), max_tokens=16, max_rows=2)
    accepted = check_drafts(made, model.drafts, 4) < 23
    assert accepted or "draft_vocab_size" in VARIANTS[kind]  # their heads are others


@pytest.mark.parametrize("kind", VARIANTS)
def test_hidden_states_of_variants_are_those_of_the_definition(
    variants: dict[str, DflashModel], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft may be the same with a slightly other state. Those after the request's limit are not used."""
    model = variants[kind]
    found: list[tuple[int, torch.Tensor]] = []
    predict = HiddenStatesBlockDrafter.predict

    def recorded(drafter: Any, ids_T: Any, positions_T: torch.Tensor, ctx: Any) -> torch.Tensor:
        hidden_TD = predict(drafter, ids_T, positions_T, ctx)
        found.append((int(positions_T[0]), hidden_TD))
        return hidden_TD

    monkeypatch.setattr(HiddenStatesBlockDrafter, "predict", recorded)
    made = drafting_engine(model.checkpoint, unchanging(dflash(model, 4)), max_tokens=16, max_rows=2)
    found.clear()  # those of the warm-up
    prompt = prompt_of(37, 5)
    made.add(0, prompt, 24)
    made.run()
    text = prompt + made.outputs[0].token_ids
    widths = [min(5, len(text) - 1 - position) for position, _ in found]
    assert min(widths) < 5 == max(widths), "blocks that end at the limit too"
    for (position, hidden_TD), width in zip(found, widths, strict=True):
        with torch.no_grad():
            expected = model.block(text[: position + 1], width)
        torch.testing.assert_close(hidden_TD[:width], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", VARIANTS)
def test_the_output_with_variants_is_the_plain_runs(variants: dict[str, DflashModel], kind: str) -> None:
    check_output(variants[kind].checkpoint, dflash(variants[kind], 3), least=0.02)


@pytest.mark.parametrize("kind", ["sliding", "ahead"])
def test_preempted_and_cached_requests_with_windows(variants: dict[str, DflashModel], kind: str) -> None:
    model = variants[kind]
    check_few_blocks(model.checkpoint, dflash(model, 3), blocks=24, requests=14)


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
