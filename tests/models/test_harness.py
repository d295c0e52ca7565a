"""The comparison itself: it refuses rows with indistinct outputs and detects wrong logprobs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from atom.shared.sampling_params import MAX_LOGPROBS
from tests.helpers.checkpoints.reference import TOLERANCE, problems, problems_of, windows
from tests.helpers.checkpoints.tiny_models import TINY_MODELS, Greedy, tiny, tiny_config
from tests.helpers.engine.served import worst_difference

GOOD = Greedy(list(range(32)), smallest_margin=0.1)

TRAITS: dict[str, Callable[[Any], bool]] = {
    "an odd number of heads": lambda config: config.num_attention_heads % 2 == 1,
    "query heads that share key heads": lambda config: (
        config.num_key_value_heads < config.num_attention_heads
    ),
    "a key head for each query head": lambda config: config.num_key_value_heads == config.num_attention_heads,
}
OPTIONAL_TRAITS: dict[str, Callable[[Any], bool]] = {
    "first_k_dense_replace": lambda config: config.first_k_dense_replace > 1,
    "mlp_only_layers": lambda config: 0 in config.mlp_only_layers,
    "decoder_sparse_step": lambda config: config.decoder_sparse_step > 1,
    "n_shared_experts": lambda config: config.n_shared_experts > 1,
    "sliding_window": lambda config: any(windows(config)),
    "n_group": lambda config: config.n_group > config.topk_group > 1,
}
"""For families with that setting."""
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_qk_norm", "norm_topk_prob")
"""In families with that setting, some rows enable it and some do not."""
UNTIED = ("olmo2", "olmo3")
"""No checkpoint of these has tied embeddings."""

LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2", "glm4_moe_lite", "mistral4")
"""These share the MLA layer, so their rows count together. They have no KV heads and no MLP biases."""


def configs(*of: str) -> list[Any]:
    return [tiny_config(model) for model in TINY_MODELS if model.model_type in of]


def missing(found: list[Any], traits: dict[str, Callable[[Any], bool]]) -> list[str]:
    return [name for name, trait in traits.items() if not any(map(trait, found))]


def constant(found: list[Any], switches: Sequence[str]) -> list[str]:
    """The switches that have the same value in all configurations."""
    made = {name: {getattr(config, name, None) for config in found} for name in switches}
    return [name for name, values in made.items() if len(values) == 1 and None not in values]


FIXED = ("kimi_linear", "deepseek_v4")
"""Their checkpoints have no biases and no tied embeddings. Kimi-Linear has MLA, as the above, and lists its
dense layers; DeepSeek-V4's other sizes are in its unit tests."""

MULTIMODAL = ("qwen3_5", "qwen3_5_moe", "kimi_k25")
"""Their text models are families with rows of their own."""


@pytest.mark.parametrize("family", sorted({model.model_type for model in TINY_MODELS} - {*LATENT, *FIXED}))
def test_rows_of_a_family_cover_what_checkpoints_vary(family: str) -> None:
    found = configs(family)
    optional = {name: trait for name, trait in OPTIONAL_TRAITS.items() if hasattr(found[0], name)}
    switches = [name for name in SWITCHES if name != "tie_word_embeddings" or family not in UNTIED]
    lacking = missing(found, TRAITS | optional) + constant(found, switches)
    assert not lacking, "add rows to tests/helpers/checkpoints/tiny_models.py"


def test_mla_rows_cover_what_checkpoints_vary() -> None:
    found = configs(*LATENT[1:])  # V2 may leave its groups unset
    odd = "an odd number of heads"
    experts = ("first_k_dense_replace", "n_shared_experts", "n_group")
    traits = {odd: TRAITS[odd]} | {name: OPTIONAL_TRAITS[name] for name in experts}
    switches = [name for name in SWITCHES if name != "mlp_bias"]
    assert not missing(found, traits) + constant(found, switches), (
        "add rows to tests/helpers/checkpoints/tiny_models.py"
    )


@pytest.mark.parametrize(
    ("output", "window", "message"),
    [
        (Greedy([1, 2] * 16, 0.1), None, "2 distinct ids"),
        (Greedy(GOOD.ids, 1e-4), None, "margin is 1.0e-04"),
        (GOOD, 96, "window of 96"),
    ],
)
def test_indistinct_rows_are_refused(output: Greedy, window: int | None, message: str) -> None:
    assert problems([GOOD], [None, 5, 24, 37, 67]) == []
    (problem,) = problems([GOOD, output], [None, window])
    assert message in problem


def test_small_weights_repeat_a_token() -> None:
    assert problems_of(tiny("llama-gqa")) == []
    assert problems_of(replace(tiny("llama-gqa"), scale=0.01))


def test_wrong_log_probabilities_are_detected() -> None:
    expected_TV = torch.arange(64.0).log_softmax(-1)[None]
    right = {token: float(expected_TV[0, token]) for token in range(63, 63 - MAX_LOGPROBS, -1)}
    assert worst_difference([right], expected_TV) == 0
    assert worst_difference([right | {3: float(expected_TV[0, 3]) + 0.5}], expected_TV) > 0.4
    missing = {token: value for token, value in right.items() if token != 60}
    with pytest.raises(AssertionError):
        worst_difference([missing | {1: float(expected_TV[0, 1])}], expected_TV)
    with pytest.raises(AssertionError):
        worst_difference([right | {63: right[63] + 3 * TOLERANCE}], expected_TV)
