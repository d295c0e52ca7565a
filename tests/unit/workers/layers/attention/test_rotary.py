"""RoPE frequencies compared with transformers, at sizes that tiny models do not reach."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from parallel.communicator import Communicator
from workers.layers.attention.rotary import RotaryEmbedding, rope_frequencies
from workers.layers.context import BuildContext

POSITIONS = 131072
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "short_factor": [1.0 + 0.01 * pair for pair in range(32)],
    "long_factor": [1.0 + 2.0 * pair for pair in range(32)],
    "original_max_position_embeddings": 4096,
}


def expected(
    head_dim: int, rope: dict[str, Any], longest: int | None = None, trained: int = POSITIONS
) -> tuple[torch.Tensor, float]:
    """transformers' result for a sequence of `longest` tokens."""
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=trained, rope_parameters=dict(rope), num_hidden_layers=1
    )
    if rope["rope_type"] == "default":
        return Glm4MoeRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", seq_len=longest)


def check(found: tuple[torch.Tensor, float], wanted: tuple[torch.Tensor, float]) -> None:
    torch.testing.assert_close(found[0], wanted[0], atol=0, rtol=2e-6)
    assert found[1] == pytest.approx(wanted[1], rel=1e-12)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.5},
        LLAMA31,
        LLAMA31 | {"factor": 32.0},
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "factor": 16.0},
        YARN | {"truncate": False},
        YARN | {"attention_factor": 1.25},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
        YARN | {"mscale": 0.7},
        YARN | {"factor": 1.0},
        YARN | {"rope_theta": 20.0, "original_max_position_embeddings": 64},
        GPT_OSS,
    ],
    ids=str,
)
@pytest.mark.parametrize(("head_dim", "part"), [(64, 1.0), (128, 1.0), (128, 0.5), (80, 0.25)])
def test_frequencies_equal_transformers(rope: dict[str, Any], head_dim: int, part: float) -> None:
    rope = rope | {"partial_rotary_factor": part}
    found = rope_frequencies(head_dim, rope, POSITIONS)
    assert len(found[0]) == head_dim * part / 2
    check(found, expected(head_dim, rope))


@pytest.mark.parametrize("longest", [100, 4096, 4097, 10000, 16384])
def test_dynamic_frequencies_are_those_of_the_longest_sequence(longest: int) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    found = rope_frequencies(64, rope | {"original_max_position_embeddings": 4096}, longest)
    check(found, expected(64, rope, longest, trained=4096))
    plain = rope_frequencies(64, {"rope_theta": 10000.0}, longest)
    assert torch.equal(found[0], plain[0]) == (longest <= 4096)


@pytest.mark.parametrize("longest", [100, 4096, 4097])
@pytest.mark.parametrize("stated", [{}, {"attention_factor": 1.5}, {"factor": 1.0}])
def test_longrope_has_a_list_for_long_sequences(longest: int, stated: dict[str, float]) -> None:
    rope = LONGROPE | stated
    check(rope_frequencies(64, rope, longest), expected(64, rope, longest))


def test_cosines_and_sines_are_multiplied_by_the_attention_factor() -> None:
    build = BuildContext(torch.float32, torch.device("cpu"), Communicator(), 50)
    rotation = RotaryEmbedding(64, GPT_OSS, build)(torch.tensor([7, 49]))
    frequencies, attention_factor = rope_frequencies(64, GPT_OSS, 50)
    angles = torch.tensor([[[7.0]], [[49.0]]]) * frequencies
    assert attention_factor > 1.3
    torch.testing.assert_close(rotation.cos_T1R[..., 32:], angles.cos() * attention_factor)
    torch.testing.assert_close(rotation.sin_T1R[..., 32:], angles.sin() * attention_factor)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"lacks rope_parameters\.original_max_position_embeddings"):
        rope_frequencies(64, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, 10)
    with pytest.raises(ValueError, match="rope type mrope is not supported; supported: default, linear"):
        rope_frequencies(64, {"rope_type": "mrope", "rope_theta": 1e4}, 10)
