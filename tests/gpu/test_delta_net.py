"""The gated delta rule on a GPU, at the sizes of Qwen3-Next: prompts in chunks, and single tokens."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from atom_ops import DecayWeights, backend, gated_delta_rule, plan_states

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
KEY_HEADS, HEADS, KEY, VALUE = 16, 32, 128, 128
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Tolerance of outputs, as parts of the largest; states are float32 in all dtypes."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    backend.resolve(GPU)
    yield
    backend.resolve(CPU)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("repeat", [False, True], ids=["random", "repeating"])
@pytest.mark.parametrize("lengths", [[2000], [130, 1, 64, 65, 300, 2, 1]], ids=str)
def test_prompts_agree_with_the_reference(dtype: torch.dtype, repeat: bool, lengths: list[int]) -> None:
    generator = torch.Generator(GPU).manual_seed(1)
    tokens, rows = sum(lengths), len(lengths)
    qkv = torch.randn(tokens, 2 * KEY_HEADS * KEY + HEADS * VALUE, generator=generator, device=GPU)
    qkv = (qkv[:1] + 0.01 * qkv if repeat else qkv).to(dtype)
    gates = torch.randn(tokens, 2 * HEADS, generator=generator, device=GPU).to(dtype)
    decay = DecayWeights(*torch.rand(2, HEADS, generator=generator, device=GPU).sub(1).unbind())
    states = 0.3 * torch.randn(rows + 1, HEADS, KEY, VALUE, generator=generator, device=GPU)
    fresh = np.arange(rows) == 1
    plan = plan_states(np.array(lengths, np.int32), np.arange(1, rows + 1), fresh, GPU)
    wanted_states = states.clone()
    wanted = gated_delta_rule.reference(qkv, gates, decay, wanted_states, plan).float()
    found = gated_delta_rule(qkv, gates, decay, states, plan).float()
    assert not gated_delta_rule.ran_reference
    assert (found - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()
    assert (states - wanted_states).abs().max() <= 5e-5 * wanted_states.abs().max()
