"""Rotation frequencies against transformers, beyond the sizes that tiny models reach."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from workers.layers.rotary import inverse_frequencies

LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.5},
        LLAMA31,
        {**LLAMA31, "factor": 32.0},
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_equal_transformers(rope: dict[str, Any], head_dim: int) -> None:
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=131072, rope_parameters=dict(rope), num_hidden_layers=1
    )
    expected = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(inverse_frequencies(head_dim, rope), expected, atol=0, rtol=1e-6)
