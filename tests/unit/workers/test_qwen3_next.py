"""Requests with a state: the real core, the real worker, and what a checkpoint may bring or lack."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from atom.messages.worker import FullAttentionSpec, RecurrentStateSpec
from tests.helpers.tiny_models import (
    checkpoint_of,
    engine_config,
    hf_greedy,
    place,
    prompt_of,
    save_tiny,
    tiny,
)
from tests.helpers.whole_engine import WholeEngine
from workers.weights.loader import WeightError
from workers.worker import Worker

BLOCK_SIZE = 4
TINY = tiny("qwen3-next")


def worker_of(directory: Path, tp: tuple[int, int] = (0, 1), **changes: Any) -> Worker:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    config = engine_config(tp=tp[1], block_size=BLOCK_SIZE)
    return Worker(config, checkpoint_of(directory), place(*tp), lambda *progress: None)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_core_learns_of_states(rank: int, tmp_path: Path) -> None:
    save_tiny(TINY, tmp_path)
    specs = worker_of(tmp_path, (rank, 2)).load().kv_specs
    channels = 16 + 16 + 2 * 12  # a key head's query, key and values
    state = 3 * channels * 4 + 2 * 16 * 12 * 4  # inputs of the convolution, matrices of the heads
    assert specs == [FullAttentionSpec(BLOCK_SIZE, 2 * 4 * 1 * 16 * 4), RecurrentStateSpec(3 * state)]


@pytest.mark.parametrize("slots", [3, 8], ids=["slots are short", "blocks are short"])
def test_preempted_and_resumed_among_others(slots: int, tmp_path: Path) -> None:
    """Slots go from one request to the next; whatever nobody owns is poisoned."""
    reference, _ = save_tiny(TINY, tmp_path)
    blocks = 40 if slots == 8 else 200
    engine = WholeEngine(worker_of(tmp_path), (blocks, slots), caching=False)
    prompts = [prompt_of(30 + number, number) for number in range(5)]
    for number, prompt in enumerate(prompts):
        engine.add(number, prompt, 24)
    engine.run()
    for number, prompt in enumerate(prompts):
        greedy = hf_greedy(reference, prompt, 24)
        assert greedy.smallest_margin > 1e-3
        assert engine.answers[number].token_ids == greedy.ids
    assert (engine.core.stats().preemptions > 0) is (slots == 8)
    assert engine.most_used[1] == (3 if slots == 3 else engine.most_used[1])


def test_tensors_that_predict_further_tokens_are_set_aside(tmp_path: Path) -> None:
    save_tiny(TINY, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = safetensors.torch.load(file.read_bytes())
    more = {"mtp.fc.weight": torch.ones(3, 4), "mtp.layers.0.mlp.gate.weight": torch.ones(2)}
    safetensors.torch.save_file(tensors | more, file, metadata={"format": "pt"})
    worker_of(tmp_path).load()
    safetensors.torch.save_file(tensors | {"other.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(WeightError, match="does not use: other.weight"):
        worker_of(tmp_path).load()


def test_the_interval_of_full_attention_stands_for_kinds_of_layers(tmp_path: Path) -> None:
    save_tiny(TINY, tmp_path)
    model = worker_of(tmp_path, layer_types=None, full_attention_interval=4)
    model.load()
    assert [list(group.layers) for group in model._model.kv_groups] == [[3], [0, 1, 2]]


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, 1, "layer_types .* is not supported: they must be"),
        ({"layer_types": ["full_attention"] * 3}, 1, "for each of 4 layers"),
        ({"linear_num_value_heads": 3}, 1, "3 value heads are not a multiple of 2 key heads"),
        ({}, 4, "tensor_parallel_size 4 does not fit 2 key heads of linear attention"),
    ],
)
def test_what_does_not_run_is_refused(changes: dict[str, Any], tp: int, message: str, tmp_path: Path) -> None:
    save_tiny(TINY, tmp_path)
    with pytest.raises(ValueError, match=message):
        worker_of(tmp_path, (0, tp), **changes).load()
