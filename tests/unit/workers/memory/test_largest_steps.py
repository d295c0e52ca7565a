"""The steps that are run at start to measure their memory."""

from pathlib import Path
from typing import Any

import pytest

from atom.shared.messages.engine import unpack_ids
from atom.shared.sampling_params import MAX_LOGPROBS
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, engine_config, place, save_tiny, tiny
from workers.memory.largest_steps import largest_steps, num_blocks, profile_batch
from workers.sampling.logits_processor_state import LogitsProcessorState
from workers.worker import Worker


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((16, 4, 100), [[4] * 4, [13, 1, 1, 1]]),
        ((16, 4, 10), [[4] * 4, [9, 5, 1, 1]]),
        ((10, 64, 100), [[1] * 10]),
        ((64, 2, 9), [[8, 8]]),
        ((4, 2, 1), [[1, 1]]),
    ],
)
def test_the_largest_steps(limits: tuple[int, int, int], expected: list[list[int]]) -> None:
    assert largest_steps(*limits) == expected


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-next"])
def test_the_profiled_steps_sample_every_row_with_every_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And the token records of all rows are as long as the longest sequence."""
    made = Worker(engine_config(), save_tiny(tiny(name), tmp_path)[1], place(), lambda *progress: None)
    made.load()
    longest_records = []
    apply = LogitsProcessorState.apply

    def counted(state: LogitsProcessorState, rows: Any, logits: Any, positions: Any, on_host: Any) -> Any:
        assert len(rows.indices) == len(rows.recorded) == len(logits)
        longest_records.append(int((on_host[rows.recorded] - rows.offsets).max()))
        return apply(state, rows, logits, positions, on_host)

    monkeypatch.setattr(LogitsProcessorState, "apply", counted)
    kv_groups, block_size, vocab_size = made._model.kv_groups, 4, made._checkpoint.vocab_size
    shapes = largest_steps(max_tokens=512, max_rows=64, max_model_len=MAX_MODEL_LEN)
    assert len(shapes) == 2 and all(sum(counts) == 512 and len(counts) == 64 for counts in shapes)
    for counts in shapes:
        blocks = num_blocks(counts, kv_groups, block_size)
        builder = made._builder
        runner = builder.runner(builder.kv_layers(blocks), builder.inputs(MAX_MODEL_LEN, blocks), [])
        batch = profile_batch(counts, kv_groups, block_size, vocab_size, MAX_MODEL_LEN)
        result = runner.launch(batch).result()
        assert result.failed == [] and len(unpack_ids(result.token_ids)) == 64
        assert result.logprobs is not None and result.logprobs.indices == list(range(64))
        assert result.logprobs.table.width == 1 + MAX_LOGPROBS
        scored = sum(len(chunk.table.ranks) // 4 for chunk in result.prompt_logprobs)
        assert scored == sum(count - 1 for count in counts[:-1])
    assert longest_records == [MAX_MODEL_LEN - 1] * 2
