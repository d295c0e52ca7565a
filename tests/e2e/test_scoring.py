"""Evaluation harnesses score continuations: their request, a real model, transformers' numbers."""

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import openai
import pytest

from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints.smollm2 import PAIRS, Scored, gguf_path, prepared, scores
from tests.helpers.servers.server import running_server

pytestmark = pytest.mark.timeout(600)

# The file's weights are integers, so the activations they meet are rounded to 16 bits.
TOLERANCE = 5e-3


@pytest.fixture(scope="module")
def sdk() -> Iterator[openai.OpenAI]:
    arguments = ("--model", gguf_path(), "--served-model-name", "smollm2", "--dtype", "float32")
    with (
        running_server(*arguments, "--max-model-len", "512") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        yield sdk


def test_prompts_have_the_ids_of_transformers() -> None:
    tokenizer = Tokenizer.from_checkpoint(prepared())
    assert tokenizer is not None
    both = [(tokenizer.encode(context), tokenizer.encode(rest)) for context, rest in PAIRS]
    found = [(context + rest, len(context)) for context, rest in both]
    assert found == [(scored.ids, scored.context_length) for scored in scores()]


@pytest.mark.parametrize("max_tokens", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_scores_are_those_of_transformers(sdk: openai.OpenAI, max_tokens: int) -> None:
    wanted = scores()
    # Twice: a prompt whose beginning is in the cache is scored as well.
    for _ in range(2):
        reply = sdk.completions.create(
            model="smollm2",
            prompt=[scored.ids for scored in wanted],
            echo=True,
            logprobs=1,
            max_tokens=max_tokens,
            temperature=0,
            seed=1234,
        ).model_dump()
        assert reply["usage"]["completion_tokens"] == max_tokens * len(wanted)
        choices = sorted(reply["choices"], key=itemgetter("index"))
        for choice, scored in zip(choices, wanted, strict=True):
            check_scores(choice["logprobs"], scored, max_tokens)


def check_scores(columns: dict[str, Any], scored: Scored, more: int) -> None:
    count = len(scored.ids)
    assert len(columns["token_logprobs"]) == count + more
    assert columns["token_logprobs"][0] is None
    for at in range(scored.context_length, count):
        value, top = columns["token_logprobs"][at], columns["top_logprobs"][at]
        assert value == pytest.approx(scored.log_probabilities[at - 1], abs=TOLERANCE)
        assert (value == max(top.values())) == scored.is_best[at - 1]
