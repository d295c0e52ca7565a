"""Sliding-window layers next to full attention: the real core and worker against the definition."""

from functools import cache
from pathlib import Path

import pytest
import torch

from atom.shared.messages.worker import FullAttentionSpec, SlidingWindowSpec
from engine_core.kv_cache.kv_plan import peak_blocks
from tests.helpers.checkpoints.alternating_model import (
    WINDOW,
    AlternatingLM,
    plain_logits,
    random_tensors,
    save,
)
from tests.helpers.checkpoints.tiny_models import engine_config, place, prompt_of
from tests.helpers.engine.whole_engine import WholeEngine
from workers.layers.attention.attention import KVGroup, group_by_window
from workers.models import registry
from workers.worker import Worker

BLOCK_SIZE = 4
PLENTY = (200, 60)
TENSORS = random_tensors(seed=3)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(registry, "model_class", lambda checkpoint: AlternatingLM)
    checkpoint = save(TENSORS, tmp_path)
    return Worker(engine_config(block_size=BLOCK_SIZE), checkpoint, place(), lambda *progress: None)


def expected(prompt: list[int], count: int) -> list[int]:
    """Greedy ids from the definition of attention."""
    return _continued(tuple(prompt), count)


@cache
def _continued(prompt: tuple[int, ...], count: int) -> list[int]:
    """Each id has a clear top-2 margin."""
    ids = list(prompt)
    for _ in range(count):
        best = plain_logits(TENSORS, ids)[-1].topk(2)
        assert best.values[0] - best.values[1] > 1e-3
        ids.append(int(best.indices[0]))
    found = ids[len(prompt) :]
    assert len(set(found)) > count // 4, "a model that repeats itself shows little"
    return found


def test_the_worker_reports_its_window_specs(worker: Worker) -> None:
    # layers x keys and values x tokens x heads x numbers x 4 bytes
    assert worker.load().kv_specs == [
        FullAttentionSpec(BLOCK_SIZE, 2 * 2 * 4 * 2 * 32 * 4),
        SlidingWindowSpec(BLOCK_SIZE, 3 * 2 * 4 * 3 * 16 * 4, WINDOW),
    ]


def test_groups_by_window() -> None:
    assert group_by_window([8, None, 8, None], 2, 16) == [KVGroup([0, 2], 2, 16, 8), KVGroup([1, 3], 2, 16)]
    assert group_by_window([None, 0], 2, 16) == [KVGroup([0, 1], 2, 16)]
    assert group_by_window([8, None, 8], 2, 16, separate=True) == [
        KVGroup([0], 2, 16, 8),
        KVGroup([1], 2, 16),
        KVGroup([2], 2, 16, 8),
    ]


@pytest.mark.parametrize("chunk", [1, 5, 16, 256])
def test_every_position_of_a_prompt(worker: Worker, chunk: int) -> None:
    engine, prompt = WholeEngine(worker, PLENTY, chunk), prompt_of(90, 1)
    engine.add(0, prompt, 1, prompt_logprobs=0)
    engine.run()
    logprobs = plain_logits(TENSORS, prompt).log_softmax(-1)
    wanted = logprobs[torch.arange(89), prompt[1:]].tolist()
    found = engine.outputs[0].prompt_logprobs
    assert list(found) == list(range(1, 90))
    assert list(found.values()) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("caching", [True, False])
def test_a_long_sequence_keeps_only_the_blocks_of_its_window(worker: Worker, caching: bool) -> None:
    engine, prompt = WholeEngine(worker, PLENTY, caching=caching), prompt_of(60, 2)
    engine.add(0, prompt, 100)
    engine.run()
    assert engine.outputs[0].token_ids == expected(prompt, 100)
    full, window = (peak_blocks(spec, 160, 16) for spec in engine.kv.specs)
    assert engine.most_used == [full, engine.most_used[1]] and engine.most_used[1] <= window < full // 4


@pytest.mark.parametrize("caching", [True, False])
def test_blocks_that_left_a_window_are_reused(worker: Worker, caching: bool) -> None:
    """Together the requests need many times the window group's blocks."""
    engine = WholeEngine(worker, (200, 30), caching=caching)
    prompts = [prompt_of(20 + 9 * number, number) for number in range(5)]
    for number, prompt in enumerate(prompts):
        engine.add(number, prompt, 40)
    engine.run()
    for number, prompt in enumerate(prompts):
        assert engine.outputs[number].token_ids == expected(prompt, 40)
    assert engine.core.stats().preemptions == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("num_blocks", "max_tokens"), [((40, 60), 16), ((200, 11), 4)], ids=["full is short", "windows are short"]
)
def test_preempted_and_resumed(
    worker: Worker, num_blocks: tuple[int, int], max_tokens: int, caching: bool
) -> None:
    engine = WholeEngine(worker, num_blocks, max_tokens, caching=caching)
    prompts = [prompt_of(30 + number, number) for number in range(4)]
    for number, prompt in enumerate(prompts):
        engine.add(number, prompt, 40)
    engine.run()
    for number, prompt in enumerate(prompts):
        assert engine.outputs[number].token_ids == expected(prompt, 40)
    assert engine.core.stats().preemptions > 0


def test_a_prefix_hit_needs_only_the_window_before_it(worker: Worker) -> None:
    engine, common = WholeEngine(worker, (200, 14)), prompt_of(70, 5)
    for number, end in enumerate(([1], [2], [3, 4, 5])):
        engine.add(number, common + end, 20)
        engine.run()
        output = engine.outputs[number]
        assert output.token_ids == expected(common + end, 20)
        assert output.cached_tokens == (68 if number else 0)
