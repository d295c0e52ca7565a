"""N-gram speculation in the real engine on one rank and on two: the tokens of the plain run."""

from pathlib import Path
from typing import Any

import pytest

from atom import LLMEngine, SamplingParams
from tests.helpers.tiny_models import prompt_of, save_tiny, tiny

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 160,
    "cpu_threads": 1,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "num_kv_blocks": 100,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
PROMPTS = [prompt_of(4, seed) * 4 for seed in range(10)]


def params() -> list[SamplingParams]:
    """Greedy and sampled, with penalties, log probabilities and several sequences."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 0.0, "frequency_penalty": 0.3, "logprobs": 2},
        {"temperature": 0.4, "n": 2, "min_tokens": 5},
    ]
    return [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=number, **kinds[number % len(kinds)])
        for number in range(len(PROMPTS))
    ]


def run(directory: Path, tp: int, **options: Any) -> tuple[list[Any], Any]:
    with LLMEngine(str(directory), tensor_parallel_size=tp, **OPTIONS, **options) as engine:
        outputs = engine.generate(PROMPTS, params())
        return [output["token_ids"] for output in outputs], engine.stats()


@pytest.mark.parametrize("tp", [1, 2])
def test_drafts_change_no_token(tmp_path: Path, tp: int) -> None:
    save_tiny(tiny("qwen3"), tmp_path)
    wanted, _ = run(tmp_path, tp)
    found, stats = run(tmp_path, tp, **NGRAM)
    assert found == wanted
    assert sum(stats.num_accepted_tokens_per_pos) > 5
