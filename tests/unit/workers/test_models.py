"""Every model family against transformers: logits at every position, and greedy ids."""

from pathlib import Path

import pytest
import torch

from atom.messages.worker import AllocateKV, ScheduledBatch
from tests.helpers.core_side import CoreSide, generate
from tests.helpers.rows import model_rows
from tests.helpers.teacher_forcing import step_logits
from tests.helpers.tiny_models import (
    MAX_MODEL_LEN,
    Tiny,
    engine_config,
    hf_greedy,
    hf_logits,
    place,
    prompt_of,
    save_tiny,
    tiny,
)
from workers.worker import Worker

BLOCKS = 256
BLOCK_SIZE = 4
NEW_TOKENS = 32
PROMPT_LENGTHS = (37, 5, 64)


class Loaded:
    """A tiny model twice: in transformers and in a worker."""

    def __init__(self, model: Tiny, directory: Path):
        self.reference, checkpoint = save_tiny(model, directory)
        self.worker = Worker(
            engine_config(block_size=BLOCK_SIZE), checkpoint, place(), lambda *progress: None
        )
        self.worker.load()
        self.worker.allocate(AllocateKV([BLOCKS], MAX_MODEL_LEN))

    def execute(self, batch: ScheduledBatch) -> bytes:
        return self.worker.execute(batch).token_ids()

    def logits(self, core: CoreSide, counts: dict[int, int]) -> torch.Tensor:
        """Logits of every token of one step, not only of those that draw."""
        return step_logits(self.worker, core.plan(counts))


@pytest.fixture(scope="module", params=model_rows())
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(tiny(request.param), tmp_path_factory.mktemp(request.param))


def fresh_core() -> CoreSide:
    return CoreSide(BLOCKS, BLOCK_SIZE, seed=3)


@pytest.mark.parametrize("chunk", [64, 16, 1])
def test_logits_equal_at_every_position(loaded: Loaded, chunk: int) -> None:
    ids = prompt_of(64, seed=9)
    core = fresh_core()
    core.add(0, ids)
    pieces = [loaded.logits(core, {0: chunk}) for _ in range(0, len(ids), chunk)]
    torch.testing.assert_close(torch.cat(pieces), hf_logits(loaded.reference, ids), atol=1e-4, rtol=0)


def test_logits_of_mixed_rows_do_not_touch_each_other(loaded: Loaded) -> None:
    lengths = {0: 20, 3: 1, 5: 45, 7: 13}
    prompts = {row: prompt_of(length, seed=row) for row, length in lengths.items()}
    core = fresh_core()
    for row, ids in prompts.items():
        core.add(row, ids)
    logits = loaded.logits(core, lengths)
    expected = torch.cat([hf_logits(loaded.reference, ids) for ids in prompts.values()])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def expected(loaded: Loaded) -> list[list[int]]:
    """Greedy ids by transformers, checked to be worth comparing."""
    found = [hf_greedy(loaded.reference, prompt_of(n, n), NEW_TOKENS) for n in PROMPT_LENGTHS]
    for greedy in found:
        assert len(set(greedy.ids)) >= 16 and greedy.smallest_gap > 1e-3
    return [greedy.ids for greedy in found]


@pytest.mark.parametrize(("chunk", "stagger"), [(MAX_MODEL_LEN, 0), (16, 0), (16, 3), (7, 5)], ids=str)
def test_greedy_ids(loaded: Loaded, expected: list[list[int]], chunk: int, stagger: int) -> None:
    prompts = [prompt_of(n, n) for n in PROMPT_LENGTHS]
    assert generate(fresh_core(), loaded.execute, prompts, NEW_TOKENS, chunk, stagger) == expected


def test_query_norm_of_qwen3_matters(tmp_path: Path) -> None:
    loaded = Loaded(tiny("qwen3"), tmp_path)
    ids = prompt_of(16, seed=1)

    def logits() -> torch.Tensor:
        core = fresh_core()
        core.add(0, ids)
        return loaded.logits(core, {0: len(ids)})

    before = logits()
    norm = loaded.worker._model.model.layers[0].self_attn.q_norm
    norm.weight[0] *= 1.5
    assert (logits() - before).abs().max() > 1e-2


def test_one_attention_call_a_layer_whatever_the_batch(tmp_path: Path) -> None:
    loaded = Loaded(tiny("llama-gqa"), tmp_path)
    layers = loaded.reference.config.num_hidden_layers
    for rows in (1, 64):
        core = fresh_core()
        for row in range(rows):
            core.add(row, prompt_of(3 + row % 9, seed=row))
        core.take(loaded.execute(core.plan({row: 3 + row % 9 for row in range(rows)})))
        batch = core.plan(dict.fromkeys(range(rows), 1))
        with torch.profiler.profile(acc_events=True) as profile:
            loaded.execute(batch)
        calls = [event for event in profile.events() if "_scaled_dot_product" in event.name]
        assert len(calls) == layers


def test_a_row_is_free_of_what_it_held_before(tmp_path: Path) -> None:
    loaded = Loaded(tiny("llama-gqa"), tmp_path)
    core = fresh_core()
    first, second = prompt_of(50, seed=1), prompt_of(6, seed=2)
    generate(core, loaded.execute, [first], 4, chunk=50)
    core.add(0, second)
    core.take(loaded.execute(core.plan({0: len(second)})))
    core.take(loaded.execute(core.plan({0: 1})))
    assert core.generated(0) == hf_greedy(loaded.reference, second, 2).ids


def test_a_resumed_request_goes_on_as_if_undisturbed(tmp_path: Path) -> None:
    """Its known tokens are prompt and generated ones; they are computed as one prompt."""
    loaded = Loaded(tiny("llama-gqa"), tmp_path)
    prompt = prompt_of(20, seed=5)
    whole = hf_greedy(loaded.reference, prompt, 12).ids
    resumed = generate(fresh_core(), loaded.execute, [prompt + whole[:5]], 7, chunk=16)
    assert resumed == [whole[5:]]
