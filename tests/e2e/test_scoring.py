"""Evaluation harnesses score continuations: their request, a real model, transformers' numbers."""

import json
import subprocess
import sys
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import openai
import pytest

from frontend.text.tokenizer import Tokenizer
from tests.helpers.server import running_server
from tests.helpers.smollm2 import REFERENCE_DEADLINE_S, gguf_path, prepared

pytestmark = pytest.mark.timeout(600)

# The file's weights are integers, so the activations they meet are rounded to 16 bits.
TOLERANCE = 5e-3
PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a bowl of rice"),
    ("Water boils at", " 100 degrees Celsius"),
    ("北京是中国的", "首都。🦊"),
]


@pytest.fixture(scope="module")
def sdk() -> Iterator[openai.OpenAI]:
    arguments = ("--model", gguf_path(), "--served-model-name", "smollm2", "--dtype", "float32")
    with (
        running_server(*arguments, "--max-model-len", "512") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        yield sdk


def prompts() -> list[tuple[list[int], int]]:
    """Ids of context and continuation, and how many are the context's."""
    tokenizer = Tokenizer.from_checkpoint(prepared())
    assert tokenizer is not None
    both = [(tokenizer.encode(context), tokenizer.encode(rest)) for context, rest in PAIRS]
    return [(context + rest, len(context)) for context, rest in both]


def reference(ids: list[list[int]]) -> list[list[tuple[float, bool]]]:
    """By transformers, for each token but the first: log probability, and whether it is the best."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.scoring"],
        input=json.dumps(ids).encode(),
        stdout=subprocess.PIPE,
        timeout=REFERENCE_DEADLINE_S,
        check=True,
    )
    rows: list[list[tuple[float, bool]]] = json.loads(done.stdout)
    return rows


@pytest.mark.parametrize("max_tokens", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_scores_are_those_of_transformers(sdk: openai.OpenAI, max_tokens: int) -> None:
    wanted = prompts()
    expected = reference([ids for ids, _ in wanted])
    # Twice: a prompt whose beginning is in the cache is scored as well.
    for _ in range(2):
        reply = sdk.completions.create(
            model="smollm2",
            prompt=[ids for ids, _ in wanted],
            echo=True,
            logprobs=1,
            max_tokens=max_tokens,
            temperature=0,
            seed=1234,
        ).model_dump()
        assert reply["usage"]["completion_tokens"] == max_tokens * len(wanted)
        choices = sorted(reply["choices"], key=itemgetter("index"))
        for choice, (ids, length), scores in zip(choices, wanted, expected, strict=True):
            check_scores(choice["logprobs"], scores, len(ids), length, max_tokens)


def check_scores(
    columns: dict[str, Any], scores: list[tuple[float, bool]], count: int, length: int, more: int
) -> None:
    assert len(columns["token_logprobs"]) == count + more
    assert columns["token_logprobs"][0] is None
    for at in range(length, count):
        value, top = columns["token_logprobs"][at], columns["top_logprobs"][at]
        score, is_best = scores[at - 1]
        assert value == pytest.approx(score, abs=TOLERANCE)
        assert (value == max(top.values())) == is_best
