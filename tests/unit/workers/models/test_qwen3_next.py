"""Qwen3-Next with the real core and worker: recurrent states, and tensors that may be absent or extra."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from atom.shared.messages.worker import FullAttentionSpec, RecurrentStateSpec
from tests.helpers.checkpoints.tiny_models import (
    checkpoint_of,
    engine_config,
    hf_greedy,
    place,
    prompt_of,
    save_tiny,
    tiny,
)
from tests.helpers.engine.whole_engine import WholeEngine
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
def test_the_worker_reports_its_state_spec(rank: int, tmp_path: Path) -> None:
    save_tiny(TINY, tmp_path)
    specs = worker_of(tmp_path, (rank, 2)).load().kv_specs
    channels = 16 + 16 + 2 * 12  # a key head's query, key and values
    state = 3 * channels * 4 + 2 * 16 * 12 * 4  # inputs of the convolution, matrices of the heads
    assert specs == [FullAttentionSpec(BLOCK_SIZE, 2 * 4 * 1 * 16 * 4), RecurrentStateSpec(3 * state)]


@pytest.mark.parametrize("slots", [3, 8], ids=["slots are short", "blocks are short"])
def test_preempted_and_resumed_in_a_batch(slots: int, tmp_path: Path) -> None:
    """State slots are reused by other requests; free slots are filled with NaN."""
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
        assert engine.outputs[number].token_ids == greedy.ids
    assert (engine.core.stats().preemptions > 0) is (slots == 8)
    assert engine.most_used[1] == (3 if slots == 3 else engine.most_used[1])


def test_mtp_tensors_are_ignored(tmp_path: Path) -> None:
    save_tiny(TINY, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = safetensors.torch.load(file.read_bytes())
    more = {"mtp.fc.weight": torch.ones(3, 4), "mtp.layers.0.mlp.gate.weight": torch.ones(2)}
    safetensors.torch.save_file(tensors | more, file, metadata={"format": "pt"})
    worker_of(tmp_path).load()
    safetensors.torch.save_file(tensors | {"other.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(WeightError, match="does not use: other.weight"):
        worker_of(tmp_path).load()


def test_layer_types_default_to_full_attention_interval(tmp_path: Path) -> None:
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
        ({}, 4, "--tensor-parallel-size 4 does not fit 2 key heads of linear attention"),
    ],
)
def test_unsupported_configurations_are_refused(
    changes: dict[str, Any], tp: int, message: str, tmp_path: Path
) -> None:
    save_tiny(TINY, tmp_path)
    with pytest.raises(ValueError, match=message):
        worker_of(tmp_path, (0, tp), **changes).load()
