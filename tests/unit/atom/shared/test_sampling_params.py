"""Values outside their range name their field; those on its border are taken."""

from typing import Any

import pytest

from atom.shared.sampling_params import SamplingParams

GOOD: list[dict[str, Any]] = [
    {"presence_penalty": -2, "frequency_penalty": 2.0},
    {"repetition_penalty": 0.01},
    {"logit_bias": {0: -100, 5: 100.0}},
    {"min_tokens": 64, "max_tokens": 64},
    {"bad_words": ["word", " spaced"]},
    {"allowed_token_ids": [0]},
    {"logprobs": 0, "prompt_logprobs": 20},
    {"include_stop_str_in_output": True, "skip_special_tokens": False},
]
BAD: list[tuple[str, Any]] = [
    ("presence_penalty", 2.01),
    ("frequency_penalty", float("nan")),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-38),  # logits divided by it are infinite
    ("repetition_penalty", float("inf")),
    ("temperature", 10**400),
    ("logit_bias", {0: 101}),
    ("logit_bias", {"0": 1}),
    ("logit_bias", {1 << 31: 1}),
    ("logit_bias", dict.fromkeys(range(1025), 0)),
    ("min_tokens", 65),
    ("min_tokens", True),
    ("bad_words", [5]),
    ("bad_words", ["\t"]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("stop_token_ids", [0] * 1025),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("include_stop_str_in_output", 1),
    ("skip_special_tokens", None),
]


@pytest.mark.parametrize("values", GOOD)
def test_values_on_the_border_are_taken(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


@pytest.mark.parametrize(("name", "value"), BAD)
def test_values_beyond_it_name_their_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} "):
        SamplingParams(**{name: value})
