"""Requests with every parameter that sampling has, and the comparison of two engines' outputs of them."""

import random
from typing import Any

import pytest

from atom.shared.messages.engine import LogitsProcessors, Sampling, pack_ids
from tests.helpers.checkpoints.tiny_models import VOCAB
from tests.helpers.engine.whole_engine import Output, WholeEngine


def processors(kind: int) -> LogitsProcessors | None:
    """Kinds 1 to 5 have some."""
    return {
        1: LogitsProcessors(frequency_penalty=0.4, presence_penalty=0.3),
        2: LogitsProcessors(repetition_penalty=1.3),
        3: LogitsProcessors(min_tokens=7, end_ids=[5, 6, 7]),
        4: LogitsProcessors(bias_ids=pack_ids([3, 9]), bias_values=[2.5, -4.0], bad_words=[[8], [10, 11]]),
        5: LogitsProcessors(allowed_ids=pack_ids(range(10, 30)), frequency_penalty=0.2),
    }.get(kind)


def add_requests(made: WholeEngine, number: int, expected: dict[int, Output]) -> None:
    """Prompts that repeat a pattern or share one, with every parameter that sampling has.

    With an expected output, half of the requests predict it, with mistakes.
    """
    source = random.Random(3)
    shared = [source.randrange(VOCAB) for _ in range(20)]
    for owner in range(0, 2 * number, 2):
        pattern = [source.randrange(VOCAB) for _ in range(source.randrange(2, 6))]
        prompt = (pattern * 8)[: source.randrange(1, 24)]
        if source.random() < 0.3:
            prompt = shared + prompt
        sampling = Sampling(
            temperature=source.choice([0.0, 0.0, 0.3, 0.7]),
            top_k=source.choice([0, 0, 5]),
            top_p=source.choice([1.0, 1.0, 0.9]),
            min_p=source.choice([0.0, 0.0, 0.05]),
            seed=owner,
            logits_processors=processors(source.randrange(12)),
            logprobs=source.choice([-1, -1, 0, 2]),
        )
        more: dict[str, Any] = {}
        if source.random() < 0.2:
            more["stop_token_ids"] = [5, 6, 7]
        mistakes, predicts = random.Random(owner), source.random() < 0.5
        if predicts and expected:
            text = [*prompt[-3:], *expected[owner].token_ids]
            text = [mistakes.randrange(VOCAB) if mistakes.random() < 0.1 else token for token in text]
            more["prediction_ids"] = pack_ids(text)
        count, n = source.randrange(1, 30), source.choice([1, 1, 1, 2])
        prompt_logprobs = 1 if owner % 14 == 0 and n == 1 else -1
        made.add(owner, prompt, count, prompt_logprobs, sampling, n, **more)


def run(made: WholeEngine, number: int, expected: dict[int, Output] | None = None) -> dict[int, Output]:
    """The outputs of so many requests; `expected` as for `add_requests`."""
    add_requests(made, number, expected or {})
    made.run()
    assert made.core.stats().kv_blocks_used == 0
    return made.outputs


def check(found: dict[int, Output], wanted: dict[int, Output]) -> None:
    """Raises AssertionError unless the ids are equal, and the logprobs within 1e-4."""
    assert found.keys() == wanted.keys()
    for number, output in found.items():
        assert output.token_ids == wanted[number].token_ids, f"request {number}"
        assert output.logprobs == pytest.approx(wanted[number].logprobs, abs=1e-4)
        assert output.prompt_logprobs == pytest.approx(wanted[number].prompt_logprobs, abs=1e-4)
        assert not output.error
