"""PDL, and GEMMs fused with the op before them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import atom_ops
from atom_ops import HeadNorms, backend
from atom_ops.op import Op

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    backend.resolve(GPU)
    yield
    backend.resolve(torch.device("cpu"))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=GPU).to(BF16)


def weight(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, device=GPU).mul_(inputs**-0.5).to(BF16)


def planned(name: str) -> list[tuple[int, int]]:
    if not torch.cuda.is_available():
        return []
    from atom_ops.triton_impl.plans.shipped import shipped_on

    return list(getattr(shipped_on(GPU), name))


def fused(op: Op[..., Any], *args: Any) -> bool:
    """Whether one fused kernel runs the call."""
    supports = op.providers["triton"].supports
    return supports is not None and supports(*args)


def separately(op: Op[..., Any], *args: Any) -> Any:
    """The op as separate calls, each with its own kernel."""
    order = op.order
    op.use([])
    try:
        return op(*args)
    finally:
        op.use(order)


@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("shape", planned("norm_linear"), ids=str)
def test_norm_and_gemm_match_the_separate_kernels(shape: tuple[int, int], with_residual: bool) -> None:
    x, residual = randn(1, shape[1]), randn(1, shape[1]) if with_residual else None
    args = x, residual, torch.rand(shape[1], device=GPU).to(BF16), 1e-6, weight(*shape)
    assert fused(atom_ops.add_norm_linear, *args)
    found, total = atom_ops.add_norm_linear(*args)
    wanted, wanted_total = separately(atom_ops.add_norm_linear, *args)
    assert torch.equal(total, wanted_total)
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("shape", planned("silu_linear"), ids=str)
def test_activation_and_gemm_match_the_separate_kernels(shape: tuple[int, int]) -> None:
    args = randn(1, 2 * shape[1]), weight(*shape)
    assert fused(atom_ops.silu_and_mul_linear, *args)
    found, wanted = atom_ops.silu_and_mul_linear(*args), separately(atom_ops.silu_and_mul_linear, *args)
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-2)


def decode(rows: int, context: int, with_norms: bool, window: int = 0) -> tuple[Any, ...]:
    """Arguments of `attend_projection` in a captured step: 32 query heads, 8 key/value heads of 128.

    Unused slots of the cache hold NaN. With a window come sinks.
    """
    blocks = -(-context // 16)
    cache = atom_ops.make_kv_layer(rows * blocks, 16, 8, 128, BF16, GPU)
    table = np.random.default_rng(0).permutation(rows * blocks).astype(np.int32).reshape(rows, blocks)
    contexts = np.maximum(context - 7 * np.arange(rows), 1).astype(np.int32)
    plan = replace(atom_ops.plan_attention(np.ones(rows, np.int32), contexts, table, GPU), host=None)
    token = np.arange(blocks * 16)
    slot_of = torch.from_numpy(table.repeat(16, 1).astype(np.int64) * 16 + token % 16)
    old = slot_of[torch.from_numpy(token < contexts[:, None] - 1)].to(GPU)
    cache.kv.fill_(float("nan")).flatten(0, 1)[old] = randn(len(old), 2, 8, 128)
    last = contexts - 1
    slots = torch.from_numpy((table[np.arange(rows), last // 16] * 16 + last % 16).astype(np.int64)).to(GPU)
    angles = torch.rand(rows, 1, 64, device=GPU) * 6.3
    weights = torch.rand(2, 128, device=GPU).to(BF16)
    norms = HeadNorms(weights[0], weights[1], 1e-6) if with_norms else None
    rotation = atom_ops.rotation(angles.cos(), angles.sin())
    rule = atom_ops.AttentionRule(128**-0.5, window, randn(32) if window else None)
    return randn(rows, 48 * 128), *rotation, cache, slots, norms, plan, rule


@pytest.mark.parametrize(("with_norms", "window"), [(True, 0), (False, 0), (False, 128), (True, 500)])
@pytest.mark.parametrize(
    ("rows", "context"), [(1, 1), (1, 70), (1, 5000), (2, 8), (3, 1500), (16, 700), (64, 90)]
)
def test_attention_of_a_projection_matches_the_separate_kernels(
    rows: int, context: int, with_norms: bool, window: int
) -> None:
    args = decode(rows, context, with_norms, window)
    cache = args[3]
    assert fused(atom_ops.attend_projection, *args)
    before = cache.kv.clone()
    found = atom_ops.attend_projection(*args)
    written = cache.kv.clone()
    cache.kv.copy_(before)
    wanted = separately(atom_ops.attend_projection, *args)
    torch.testing.assert_close(written, cache.kv, atol=1.6e-2, rtol=1.6e-2, equal_nan=True)
    changed = (written.view(torch.int16) != before.view(torch.int16)).flatten(2).any(-1)
    assert changed.sum() == len(args[0])
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)


def chain(x: Tensor, weights: list[Tensor], scale: Tensor) -> Callable[[], Tensor]:
    """Many short kernels, each of which reads the previous one's output."""

    def run() -> Tensor:
        y, total = x, None
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            wide, total = atom_ops.add_norm_linear(y, total, scale, 1e-6, up)
            y = atom_ops.silu_and_mul_linear(wide, down)
        return atom_ops.rms_norm(y, scale, 1e-6)

    return run


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_a_captured_chain_never_reads_too_early(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_ops.triton_impl.hardware import pdl

    x, scale = randn(tokens, 1024), torch.rand(1024, device=GPU).to(BF16)
    weights = [weight(*shape) for _ in range(12) for shape in ((6144, 1024), (1024, 3072))]
    run = chain(x, weights, scale)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    found = []
    for seed in range(20):
        x.copy_(torch.randn(tokens, 1024, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        found.append(out.clone())
    pdl.launch_options.cache_clear()
    monkeypatch.setattr(pdl, "_HOPPER", (99, 0))
    for seed in range(20):
        x.copy_(torch.randn(tokens, 1024, generator=torch.Generator().manual_seed(seed)))
        torch.cuda.synchronize()
        assert torch.equal(run(), found[seed])
    pdl.launch_options.cache_clear()
