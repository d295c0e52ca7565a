"""The library over two engines: the outputs of one, in the order of the prompts."""

from pathlib import Path
from typing import Any

import pytest

from atom import LLMEngine, SamplingParams
from tests.helpers.tiny_models import prompt_of, save_tiny, tiny

PROMPTS = [prompt_of(5 + number % 30, number) for number in range(60)]
PARAMS = [
    SamplingParams(
        max_tokens=16, temperature=1.2 * (number % 2), seed=number, ignore_eos=True, n=1 + number % 3
    )
    for number in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("model")
    save_tiny(tiny("llama-gqa"), directory)
    return str(directory)


def engine(model: str, engines: int) -> LLMEngine:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1}
    return LLMEngine(model, data_parallel_size=engines, max_model_len=128, num_kv_blocks=64, **options)


def ids_of(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def test_two_engines_generate_what_one_generates(model: str) -> None:
    with engine(model, 1) as alone:
        expected = ids_of(alone.generate(PROMPTS, PARAMS))
        limits = alone.max_model_len, 2 * alone.kv_tokens, 2 * alone.weight_bytes
        counted_alone = alone.stats()
    with engine(model, 2) as both:
        assert (both.max_model_len, both.kv_tokens, both.weight_bytes) == limits
        assert ids_of(both.generate(PROMPTS, PARAMS)) == expected
        counted = both.stats()
        assert counted.generated_tokens == counted_alone.generated_tokens
        assert counted.kv_blocks_total == 2 * counted_alone.kv_blocks_total
        assert counted.running == counted.waiting == counted.kv_blocks_used == 0
        ids = both.add_request(PROMPTS[:8], SamplingParams(max_tokens=100, ignore_eos=True))
        both.step()
        both.abort(ids)
        assert both.is_finished() and ids_of(both.generate(PROMPTS[:3], PARAMS[:3])) == expected[:6]
