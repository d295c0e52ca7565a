"""Routing and experts on a GPU: torch as exact as on the CPU, the kernels at the shapes of models."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from atom_ops import ExpertWeights, RoutingRule, backend, experts, route
from atom_ops.op import REFERENCE, Case, Op
from atom_ops.ops.experts.experts import ClampedSwiglu
from atom_ops.ops.linear.linear import BATCH_INVARIANT
from tests.helpers.kernels.op_cases import CPU, DTYPES, changed, check

GPU = torch.device("cuda", 0)
ROWS = [(op, case) for op in (experts, route) for case in op.cases]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BF16 = torch.bfloat16
GPT_OSS = ClampedSwiglu(7.0, 1.702)
# Experts, hidden size, features of an expert, experts of a token; GPT-OSS with biases.
SHAPES = {
    "Qwen3-30B-A3B": (128, 2048, 768, 8),
    "GPT-OSS-20B": (32, 2880, 2880, 4),
    "DeepSeek-V2-Lite": (64, 2048, 1408, 6),
    "Mixtral-8x7B": (8, 4096, 14336, 2),
    "sizes that no tile divides": (10, 1032, 200, 3),
}
each_case = pytest.mark.parametrize(
    ("op", "case"), ROWS, ids=[f"{op.name}-{case.label}" for op, case in ROWS]
)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    """What the references call runs in torch."""
    backend.resolve(CPU, [REFERENCE])
    yield
    backend.resolve(CPU)


@each_dtype
@each_case
def test_agrees_with_the_cpu(op: Op[..., Any], case: Case, dtype: torch.dtype) -> None:
    check(op, op.providers[REFERENCE], dtype, case, GPU)


@each_dtype
@each_case
def test_a_captured_call_follows_its_inputs(op: Op[..., Any], case: Case, dtype: torch.dtype) -> None:
    """Capturing fails on a synchronisation."""
    first, second = (
        changed(case.make(dtype, torch.Generator().manual_seed(seed)), lambda tensor: tensor.to(GPU))
        for seed in (1, 2)
    )
    op.reference(*first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op.reference(*first)
    for place, value in zip(first, second, strict=True):
        if isinstance(place, torch.Tensor):
            place.copy_(value)
    graph.replay()
    wanted = op.reference(*first)
    pairs = zip(captured, wanted, strict=True) if isinstance(wanted, tuple) else [(captured, wanted)]
    for found, expected in pairs:
        assert torch.equal(found, expected)


@cache
def layer(name: str) -> ExpertWeights:
    count, hidden, features, _ = SHAPES[name]
    torch.manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device=GPU).normal_(std=shape[-1] ** -0.5)

    biases = (random(count, 2 * features), random(count, hidden)) if name == "GPT-OSS-20B" else (None, None)
    return ExpertWeights(random(count, 2 * features, hidden), random(count, hidden, features), *biases)


def call(name: str, tokens: int, seed: int = 2) -> tuple[Any, ...]:
    count, hidden, _, chosen = SHAPES[name]
    generator = torch.Generator(GPU).manual_seed(seed)
    x = torch.randn(tokens, hidden, device=GPU, generator=generator).to(BF16)
    topk_weights, ids = torch.rand(tokens, count, device=GPU, generator=generator).topk(chosen)
    weights = layer(name)
    return (
        x,
        ids,
        topk_weights / topk_weights.sum(1, keepdim=True),
        weights,
        GPT_OSS if name == "GPT-OSS-20B" else None,
    )


def exact(
    x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor, weights: Any, activation: Any
) -> Any:
    """The op in float32, an expert at a time."""
    out = torch.zeros(x.shape, device=GPU)
    for expert in range(len(weights.down_XDF)):
        token, place = (ids == expert).nonzero(as_tuple=True)
        bias = [
            None if b is None else b[expert].float() for b in (weights.gate_up_bias_XO, weights.down_bias_XD)
        ]
        inner = torch.nn.functional.linear(x[token].float(), weights.gate_up_XOD[expert].float(), bias[0])
        gate, up = inner.chunk(2, -1)
        if activation is None:
            inner = torch.nn.functional.silu(gate) * up
        else:
            gate = gate.clamp(max=activation.limit)
            inner = (
                (up.clamp(-activation.limit, activation.limit) + 1)
                * gate
                * (gate * activation.alpha).sigmoid()
            )
        y = torch.nn.functional.linear(inner, weights.down_XDF[expert].float(), bias[1])
        out.index_put_((token,), y * topk_weights[token, place, None], accumulate=True)
    return out


def check_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert ((found.float() - wanted).norm() / wanted.norm()).item() < 6e-3
    torch.testing.assert_close(found.float(), wanted, atol=0.06, rtol=0.03)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 16, 33, 64, 256, 700, 4096, 16384])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_at_the_shapes_of_models(name: str, tokens: int) -> None:
    backend.resolve(GPU)
    args = call(name, tokens)
    wanted = exact(*args)
    for provider in ("triton", BATCH_INVARIANT):
        check_close(experts.providers[provider].function(*args), wanted)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "GPT-OSS-20B"])
def test_every_kind_of_plan(name: str) -> None:
    backend.resolve(GPU)
    from atom_ops.triton_impl.experts import expert_plans
    from atom_ops.triton_impl.experts.experts import multiply
    from atom_ops.triton_impl.hardware.target import is_hopper
    from atom_ops.triton_impl.plans.shipped import shipped_plans

    hopper = is_hopper(GPU)
    plans: list[expert_plans.ExpertPlan] = [expert_plans._FEW, expert_plans.BATCH_INVARIANT]
    plans += [plan for _, plan in expert_plans._ANYWHERE]
    if hopper:  # other GPUs have less shared memory
        plans += [plan for _, plan in expert_plans._HOPPER]
        measured = shipped_plans("NVIDIA H200").experts.items()
        plain = [found for (format, _), found in measured if format == "plain"]
        plans += [plan for found in plain for plan in found]
    for tokens in (3, 150):
        x, ids, topk_weights, weights, activation = call(name, tokens)
        wanted = exact(x, ids, topk_weights, weights, activation)
        for plan in dict.fromkeys(plans):
            for described in (False, True) if hopper else (False,):
                check_close(multiply(plan, x, ids, topk_weights, weights, activation, described), wanted)


@pytest.mark.parametrize("tokens", [1, 4, 64, 600, 5000])
def test_all_tokens_choose_the_same_experts(tokens: int) -> None:
    backend.resolve(GPU)
    x, ids, *rest = call("Qwen3-30B-A3B", tokens)
    ids = ids[:1].expand(tokens, -1).contiguous()
    check_close(experts(x, ids, *rest), exact(x, ids, *rest))


@pytest.mark.parametrize("tokens", [1, 4, 64, 600, 5000])
def test_captured_kernels_follow_the_routing(tokens: int) -> None:
    backend.resolve(GPU)
    rule, count = RoutingRule(8, "softmax", renormalise=True), SHAPES["Qwen3-30B-A3B"][0]
    weights, logits = layer("Qwen3-30B-A3B"), torch.randn(tokens, count, device=GPU)
    x = call("Qwen3-30B-A3B", tokens)[0]

    def run() -> torch.Tensor:
        return experts(x, *route(logits, rule), weights)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    assert not experts.ran_reference and not route.ran_reference
    for seed in range(5):
        torch.manual_seed(seed)
        logits.normal_()
        if seed == 4:
            logits[-1] = float("nan")
        graph.replay()
        ids, topk_weights = route.reference(logits, rule)
        real = slice(0, tokens - 1 if seed == 4 else tokens)
        if tokens > 1 or seed < 4:
            check_close(out[real], exact(x[real], ids[real], topk_weights[real], weights, None))
        assert torch.equal(run()[real], out[real])


def test_a_rows_bits_do_not_depend_on_the_batch() -> None:
    backend.resolve(GPU, batch_invariant=True)
    x, ids, topk_weights, weights, _ = call("Qwen3-30B-A3B", 700)
    whole = experts(x, ids, topk_weights, weights)
    for tokens in (1, 2, 17, 64, 200, 700):
        for first in (0, 700 - tokens):
            rows = slice(first, first + tokens)
            assert torch.equal(experts(x[rows], ids[rows], topk_weights[rows], weights), whole[rows]), (
                tokens,
                first,
            )
    order = torch.randperm(700, device=GPU)
    assert torch.equal(experts(x[order], ids[order], topk_weights[order], weights), whole[order])
    assert not experts.ran_reference
