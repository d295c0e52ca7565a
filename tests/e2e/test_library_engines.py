"""The library over one engine and two: its forms of prompts, and the outputs in the order of the prompts."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import atom
from atom import LLMEngine, SamplingParams
from atom.engine.errors import EngineDeadError
from tests.helpers.checkpoints.tiny_models import prompt_of, save_tiny, tiny
from tests.helpers.servers.random_server import write_checkpoint

pytestmark = pytest.mark.timeout(300)

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


def engine(model: str, engines: int, **changes: Any) -> LLMEngine:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, **changes}
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


def test_one_prompt_a_conversation_and_the_end(tmp_path: Path) -> None:
    checkpoint = str(write_checkpoint(tmp_path / "model"))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with engine(checkpoint, 1, load_dummy=True) as made:
        (one,) = made.generate("hello world", params)
        (listed,) = made.generate(["hello world"], params)
        assert made.tokenizer is not None
        (by_ids,) = made.generate(made.tokenizer.encode("hello world"), params)
        assert one["token_ids"] == listed["token_ids"] == by_ids["token_ids"]
        messages = [{"role": "user", "content": "hello"}]
        (reply,) = made.chat(messages, params)
        (same,) = made.generate(made.chat_prompt(messages), params)
        assert reply["token_ids"] == same["token_ids"]
        assert ids_of(made.chat([messages] * 2, params)) == [reply["token_ids"]] * 2
        with pytest.raises(TypeError, match="prompt 0 is neither"):
            made.generate([{"prompt": "hello"}], params)  # type: ignore[list-item]
        made.add_request("hello", params)
    made.close()
    for use in (made.step, made.stats, functools.partial(made.generate, "hello")):
        with pytest.raises(EngineDeadError, match="closed"):
            use()


def test_an_engine_that_is_not_closed_ends_with_its_object(model: str, run_directories: Path) -> None:
    program = """
import os, sys
from atom import LLMEngine, SamplingParams

def generating():
    engine = LLMEngine(sys.argv[1], device="cpu", dtype="float32", max_model_len=128, num_kv_blocks=64)
    engine.generate([5, 6, 7], SamplingParams(max_tokens=2))
    return engine

engine = generating()
if os.fork() == 0:
    sys.exit()
os.wait()
engine.generate([5, 6, 7], SamplingParams(max_tokens=2))  # the fork has not ended it
del engine
assert not os.listdir(os.environ["TMPDIR"])
engine = generating()  # and this one with the program
"""
    command = [sys.executable, "-c", program, model]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert not list(run_directories.iterdir())


def test_public_names() -> None:
    assert dir(atom) == sorted([*atom.__all__, "__version__"])
    assert all(hasattr(atom, name) for name in dir(atom))
