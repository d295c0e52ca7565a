"""The comparison itself: it refuses rows that prove little, and sees what is wrong."""

from dataclasses import replace

import pytest
import torch

from atom.sampling_params import MAX_LOGPROBS
from tests.helpers.reference import TOLERANCE, problems, problems_of
from tests.helpers.served import worst_difference
from tests.helpers.tiny_models import Greedy, tiny

GOOD = Greedy(list(range(32)), smallest_gap=0.1)


@pytest.mark.parametrize(
    ("answer", "window", "said"),
    [
        (Greedy([1, 2] * 16, 0.1), None, "2 distinct ids"),
        (Greedy(GOOD.ids, 1e-4), None, "differ by 1.0e-04"),
        (GOOD, 64, "window of 64"),
    ],
)
def test_rows_that_prove_little(answer: Greedy, window: int | None, said: str) -> None:
    assert problems([GOOD], [None, 24]) == []
    (problem,) = problems([GOOD, answer], [None, window])
    assert said in problem


def test_small_weights_repeat_a_token() -> None:
    assert problems_of(tiny("llama-gqa")) == []
    assert problems_of(replace(tiny("llama-gqa"), scale=0.01))


def test_wrong_log_probabilities_are_seen() -> None:
    expected_TV = torch.arange(64.0).log_softmax(-1)[None]
    right = {token: float(expected_TV[0, token]) for token in range(63, 63 - MAX_LOGPROBS, -1)}
    assert worst_difference([right], expected_TV) == 0
    assert worst_difference([right | {3: float(expected_TV[0, 3]) + 0.5}], expected_TV) > 0.4
    missing = {token: value for token, value in right.items() if token != 60}
    with pytest.raises(AssertionError):
        worst_difference([missing | {1: float(expected_TV[0, 1])}], expected_TV)
    with pytest.raises(AssertionError):
        worst_difference([right | {63: right[63] + 3 * TOLERANCE}], expected_TV)
