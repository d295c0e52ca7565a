"""Draft models with recurrent layers: what they draft does not change the states that they go on from."""

import dataclasses
from pathlib import Path

import pytest
import torch

from atom.shared.config.device import DeviceConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.worker import RecurrentStateSpec
from tests.helpers.checkpoints.mtp_models import save_vision_mtp_model
from tests.helpers.checkpoints.tiny_models import (
    checkpoint_of,
    engine_config,
    place,
    prompt_of,
)
from tests.helpers.engine.drafting import (
    PLAIN,
    SavedPair,
    accepted_share,
    check_drafts,
    check_few_blocks,
    check_output,
    drafting_engine,
    drafting_worker,
    rarely,
    recorded,
    saved_pairs,
    unchanging,
)
from tests.helpers.engine.drafting_steps import GREEDY, DraftingSteps, save_pair, simulate_gpu
from tests.helpers.engine.whole_engine import WholeEngine
from workers.batch.draft_states import predicting_states
from workers.spec_decode import adaptive, draft_model
from workers.worker import Worker

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("llama-gqa", "qwen3.5", "qwen3-next", "kimi-linear")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SavedPair]:
    return saved_pairs(FAMILIES, tmp_path_factory)


def drafted(path: str | Path, drafts: int) -> SpeculativeConfig:
    return unchanging(SpeculativeConfig("draft_model", drafts, draft_model=str(path)))


@pytest.mark.parametrize(
    ("target", "draft", "drafts", "ranks"),
    [
        ("llama-gqa", "qwen3.5", 3, 1),
        rarely("llama-gqa", "qwen3.5", 1, 1),
        rarely("llama-gqa", "qwen3-next", 4, 2),
        ("kimi-linear", "qwen3.5", 2, 1),
        ("qwen3.5", "kimi-linear", 3, 1),
        rarely("llama-gqa", "kimi-linear", 4, 1),
        rarely("qwen3.5", "llama-gqa", 3, 1),
    ],
)
@pytest.mark.parametrize("forced", [None, 1.9], ids=["verified", "forced"])
def test_drafts_are_the_draft_models_tokens(
    models: dict[str, SavedPair], target: str, draft: str, drafts: int, ranks: int, forced: float | None
) -> None:
    """Drafts of another family are never right; with forced acceptance from none to all are accepted."""
    model = models[draft]
    settings = drafted(model.checkpoint.directory, drafts)
    settings = dataclasses.replace(settings, spec_decode_acceptance_length=forced)
    made = drafting_engine(models[target].checkpoint, settings, ranks=ranks, max_tokens=16, max_rows=2)
    steps = check_drafts(made, model.drafts, drafts)
    assert steps < 20 if forced else steps == 24


@pytest.mark.parametrize("name", ["qwen3.5", rarely("qwen3-next"), rarely("kimi-linear")])
@pytest.mark.parametrize("drafts", [rarely(1), rarely(2), 3, rarely(4)])
def test_a_model_accepts_its_own_drafts(models: dict[str, SavedPair], name: str, drafts: int) -> None:
    model = models[name]
    settings = drafted(model.checkpoint.directory, drafts)
    made = drafting_engine(model.checkpoint, settings, max_tokens=16, max_rows=2)
    check_drafts(made, model.drafts, drafts)
    assert accepted_share(made) > 1 - 0.2 / drafts


def test_checkpoints_as_published_draft(tmp_path: Path) -> None:
    """With a vision tower and a layer for multi-token prediction, which both take no part."""
    save_vision_mtp_model(tmp_path)
    made = drafting_engine(checkpoint_of(tmp_path), drafted(tmp_path, 3), max_tokens=16, max_rows=2)
    made.add(0, prompt_of(37, 5), 24)
    made.run()
    assert accepted_share(made) > 0.9


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("draft_model qwen3.5", 3),
        *(rarely("draft_model qwen3.5", drafts) for drafts in (1, 2, 4)),
        *(rarely("draft_model-qwen3.5 llama-gqa", drafts) for drafts in (1, 2, 3, 4)),
        rarely("draft_model kimi-linear", 3),
        rarely("draft_model-kimi-linear llama-gqa", 3),
    ],
)
def test_the_output_is_the_plain_runs(tmp_path: Path, name: str, drafts: int) -> None:
    """Greedy and sampled rows; several, but not most, drafts are right."""
    pair = save_pair(name, tmp_path)
    check_output(pair.checkpoint, pair.drafts(drafts), least=0.05)


@pytest.mark.parametrize("target", ["llama-gqa", rarely("qwen3.5")])
def test_preempted_and_cached_requests(models: dict[str, SavedPair], target: str) -> None:
    """Prompts continue from saved states of both models."""
    draft = models["qwen3.5"].noisy
    check_few_blocks(models[target].checkpoint, drafted(draft, 3), blocks=24, requests=20)


@pytest.mark.parametrize("target", ["llama-gqa", "qwen3.5"])
def test_a_cached_prefix_has_the_drafts_state(models: dict[str, SavedPair], target: str) -> None:
    model = models["qwen3.5"]
    made = drafting_engine(
        models[target].checkpoint, drafted(model.checkpoint.directory, 3), max_tokens=64, max_rows=1
    )
    prompt = prompt_of(45, 3)
    made.add(0, prompt, 8)
    made.run()
    found = recorded(made)
    text = prompt + prompt_of(5, 4)
    made.add(1, text, 12)
    made.run()
    assert made.outputs[1].cached_tokens == 44
    text = text + made.outputs[1].token_ids
    assert found[0][0] == 50
    for position, drafts in found:
        usable = max(min(3, len(text) - 2 - position), 0)
        assert drafts[:usable] == model.drafts(text[: position + 1], usable), position


def test_a_slot_has_a_place_for_each_draft(models: dict[str, SavedPair]) -> None:
    """The engine core counts them like those of a model with recurrent layers."""
    draft = models["qwen3.5"].checkpoint
    plain = drafting_worker(draft, PLAIN).load().kv_specs
    (alone,) = (spec for spec in plain if isinstance(spec, RecurrentStateSpec))
    for target, groups in (("llama-gqa", 1), ("qwen3.5", 2)):
        worker = drafting_worker(models[target].checkpoint, drafted(draft.directory, 3))
        specs = [spec for spec in worker.load().kv_specs if isinstance(spec, RecurrentStateSpec)]
        assert specs == [RecurrentStateSpec(4 * alone.bytes_per_slot, 4)] * groups


@pytest.mark.parametrize("is_first", [True, False])
def test_predictions_leave_the_kept_state(is_first: bool) -> None:
    slots_R, accepted_R = torch.tensor([3, -1, 0]), torch.tensor([1, 3, 3])
    plan = predicting_states(slots_R, accepted_R, 4, is_first, on_host=False)
    assert plan.slots_R.tolist() == [14, -1, 0]
    assert plan.starts_from_R.tolist() == ([13, -1, 3] if is_first else [14, -1, 0])


def test_states_are_right_after_pauses(models: dict[str, SavedPair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that fail often pause, and steps without drafts are recorded; the model follows these, too."""
    monkeypatch.setattr(draft_model, "relative_cost", lambda draft, model: 0.0)
    monkeypatch.setattr(adaptive, "SHORTEST_PAUSE", 3)
    model = models["qwen3.5"]
    settings = dataclasses.replace(drafted(model.noisy, 4), spec_decode_adaptive=True)
    config = dataclasses.replace(engine_config(), speculative=settings)
    device = dataclasses.replace(
        config.device, cudagraph_capture_sizes="[1,2]", cudagraph_mode="FULL_DECODE_ONLY"
    )
    config = dataclasses.replace(config, device=device)
    made = WholeEngine(Worker(config, model.checkpoint, place(), lambda *progress: None), 200, max_rows=1)
    found = recorded(made)
    prompt = prompt_of(21, 6)
    made.add(0, prompt, 60)
    made.run()
    text = prompt + made.outputs[0].token_ids
    numbers = set()
    for position, drafts in found:
        number = sum(draft >= 0 for draft in drafts)
        numbers.add(number)
        assert drafts[:number] == model.noisy_drafts(text[: position + 1], number), position
    assert len(numbers) > 2 and 0 in numbers


@pytest.mark.parametrize("name", ["qwen3.5", rarely("qwen3-next")])
@pytest.mark.parametrize("sizes", [rarely("[]"), "[1,2,4,8]"])
def test_graphs_keep_the_state(
    models: dict[str, SavedPair], monkeypatch: pytest.MonkeyPatch, name: str, sizes: str
) -> None:
    """As on a GPU, where the host does not know what was accepted: the model accepts its own drafts."""
    checkpoint = models[name].checkpoint
    device = DeviceConfig("cpu", cpu_threads=1, cudagraph_capture_sizes="[]")
    wanted = DraftingSteps(checkpoint, device, place()).run(GREEDY)
    simulate_gpu(monkeypatch)
    device = dataclasses.replace(device, cudagraph_capture_sizes=sizes, cudagraph_mode="FULL_DECODE_ONLY")
    for drafts in (1, 3):
        made = DraftingSteps(checkpoint, device, place(), drafted(checkpoint.directory, drafts))
        for in_flight in (1, 2):
            assert made.run(GREEDY, in_flight) == wanted
        assert made.accepted > (1 - 0.2 / drafts) * made.verified > 100
