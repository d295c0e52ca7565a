"""`experts` with quantized weights on a GPU: the kernels at the shapes of models, against float32."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from atom_ops import ExpertWeights, backend, experts
from atom_ops.ops.linear.linear import BATCH_INVARIANT
from tests.gpu.test_experts import CPU, GPT_OSS, GPU
from tests.gpu.test_experts import exact as plain_exact

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
_FP8_MODELS = () if torch.version.hip else ("Qwen3-30B-A3B-FP8", "Qwen3-30B-A3B-PTPC")
"""On AMD these experts are AITER's, or torch's."""
MODELS = ("GPT-OSS-20B-MXFP4", "Kimi-K2-INT4", *_FP8_MODELS, "Qwen3-30B-A3B-INT8")
MOST_EXPERTS = 32
ROUNDING = {"block_fp8": 0.05, "channel_fp8": 0.05, "int8": 0.025}
"""Two GEMMs with rounded activations: an input in e4m3 is off by 2.6 % on average."""
EXACT = 6e-3


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    yield
    backend.resolve(CPU)


@cache
def layer(name: str) -> tuple[Any, ExpertWeights]:
    from tools.tune_experts import MODELS as SHAPES
    from tools.tune_experts import made_weights

    torch.manual_seed(1)
    model = replace(SHAPES[name], experts=min(SHAPES[name].experts, MOST_EXPERTS))
    return model, made_weights(model, model.experts)


def call(name: str, tokens: int) -> tuple[Any, ...]:
    model, weights = layer(name)
    generator = torch.Generator(GPU).manual_seed(tokens)
    x = torch.randn(tokens, model.hidden, device=GPU, generator=generator).bfloat16()
    topk_weights, ids = torch.rand(tokens, model.experts, device=GPU, generator=generator).topk(model.chosen)
    return (
        x,
        ids,
        topk_weights / topk_weights.sum(1, keepdim=True),
        weights,
        GPT_OSS if model.biased else None,
    )


def exact(
    x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor, weights: Any, activation: Any
) -> Any:
    """The op in float32, with dequantized weights."""
    matrices = [
        torch.stack([matrix.expert(number).dequantized(torch.float32) for number in range(matrix.shape[0])])
        for matrix in (weights.gate_up_XOD, weights.down_XDF)
    ]
    plain = replace(weights, gate_up_XOD=matrices[0], down_XDF=matrices[1])
    return plain_exact(x, ids, topk_weights, plain, activation)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("tokens", [1, 3, 5, 17, 64, 300, 1500, 5000])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_at_the_shapes_of_models(name: str, tokens: int) -> None:
    backend.resolve(GPU)
    args = call(name, tokens)
    wanted = exact(*args)
    for provider in ("triton", BATCH_INVARIANT):
        found = experts.providers[provider].function(*args)
        assert error(found, wanted) < ROUNDING.get(layer(name)[0].format, EXACT), provider


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_plan(name: str) -> None:
    from atom_ops.triton_impl.experts import expert_plans as plans
    from atom_ops.triton_impl.experts.experts import multiply
    from atom_ops.triton_impl.hardware.target import is_hopper
    from atom_ops.triton_impl.plans.shipped import shipped_plans

    backend.resolve(GPU)
    format, hopper = layer(name)[0].format, is_hopper(GPU)
    tables = *plans._plans(format, hopper), *plans._ANYWHERE
    tried = [plans.few(format), *(plan for _, plan in tables)]
    tried += [
        plan
        for tuned_layer, found in shipped_plans("NVIDIA H200").experts.items()
        if tuned_layer[0] == format
        for plan in found
        if hopper
    ]
    for tokens in (3, 150):
        args = call(name, tokens)
        wanted = exact(*args)
        for plan in dict.fromkeys(tried):
            for described in (False, True) if hopper else (False,):
                assert error(multiply(plan, *args, described), wanted) < ROUNDING.get(format, EXACT), plan


@pytest.mark.parametrize("tokens", [1, 40, 300])
@pytest.mark.parametrize("name", ["GPT-OSS-20B-MXFP4", "Kimi-K2-INT4"])
def test_skewed_and_missing_experts(name: str, tokens: int) -> None:
    """All tokens choose the same experts; then none of them is here, and memory holds NaN."""
    backend.resolve(GPU)
    x, ids, topk_weights, weights, activation = call(name, tokens)
    same = ids[:1].expand_as(ids).contiguous()
    wanted = exact(x, same, topk_weights, weights, activation)
    assert error(experts(x, same, topk_weights, weights, activation), wanted) < EXACT
    torch.full((1 << 24,), torch.nan, dtype=torch.bfloat16, device=GPU)
    nowhere = torch.full_like(ids, -1)
    assert not experts(x, nowhere, topk_weights, replace(weights, complete=False), activation).any()


@pytest.mark.parametrize("tokens", [2, 300])
@pytest.mark.parametrize("name", MODELS)
def test_experts_of_other_ranks_add_nothing(name: str, tokens: int) -> None:
    backend.resolve(GPU)
    x, ids, topk_weights, weights, activation = call(name, tokens)
    ids[::2, 0] = -1
    ids[1::3, 1] = weights.down_XDF.shape[0] + 7
    found = experts(x, ids, topk_weights, replace(weights, complete=False), activation)
    assert not experts.ran_reference
    assert error(found, exact(x, ids, topk_weights, weights, activation)) < ROUNDING.get(
        layer(name)[0].format, EXACT
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_rows_bits_do_not_depend_on_the_batch(name: str) -> None:
    backend.resolve(GPU, batch_invariant=True)
    x, ids, topk_weights, weights, activation = call(name, 200)
    whole = experts(x, ids, topk_weights, weights, activation)
    for tokens in (1, 17, 100):
        rows = slice(200 - tokens, 200)
        assert torch.equal(experts(x[rows], ids[rows], topk_weights[rows], weights, activation), whole[rows])
    assert not experts.ran_reference
