"""The Triton kernels of `experts`, in Triton's interpreter: sorting, every kind of plan, bits of a row."""

from collections.abc import Iterator

import pytest
import torch

from atom_ops import ExpertWeights, backend, experts, triton_impl
from atom_ops.ops.experts.experts import ClampedSwiglu, ExpertActivation
from atom_ops.ops.linear.linear import BATCH_INVARIANT
from atom_ops.triton_impl.hardware import target

pytestmark = pytest.mark.skipif(not target.INTERPRETED, reason="needs TRITON_INTERPRET=1")
CPU = torch.device("cpu")
GPT_OSS = ClampedSwiglu(7.0, 1.702)


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    triton_impl.load()
    backend.resolve(CPU, ["torch"])
    yield
    backend.resolve(CPU)


def weights_of(count: int, hidden: int, features: int, biased: bool) -> ExpertWeights:
    biases = (torch.randn(count, 2 * features), torch.randn(count, hidden)) if biased else (None, None)
    gate_up = torch.randn(count, 2 * features, hidden) / hidden**0.5
    return ExpertWeights(gate_up, torch.randn(count, hidden, features) / features**0.5, *biases)


def routed(tokens: int, count: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(tokens, count).topk(chosen).indices, torch.rand(tokens, chosen)


@pytest.mark.parametrize(("unchunked", "chunk"), [(4096, 256), (16, 32), (16, 64)])
@pytest.mark.parametrize(
    ("tokens", "count", "chosen", "rows"), [(1, 8, 2, 16), (90, 5, 3, 16), (70, 60, 4, 32)]
)
def test_pairs_are_sorted_by_expert_and_pair(
    tokens: int,
    count: int,
    chosen: int,
    rows: int,
    unchunked: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once and in chunks, of which some are added up at once."""
    from atom_ops.triton_impl.experts import expert_blocks

    monkeypatch.setattr(expert_blocks, "_MOST_UNCHUNKED", unchunked)
    monkeypatch.setattr(expert_blocks, "_CHUNK", chunk)
    monkeypatch.setattr(expert_blocks, "_ADDED_AT_ONCE", 2)
    ids, _ = routed(tokens, count, chosen)
    ids[0, 0], ids[-1, -1] = -1, count  # no experts: left out
    made = expert_blocks.sort_by_expert(ids, count, rows)
    flat = ids.flatten()
    known = (flat >= 0) & (flat < count)
    order = flat.masked_fill(~known, count).sort(stable=True).indices[: int(known.sum())]
    assert made.order_P[: len(order)].tolist() == order.tolist()
    found = made.blocks[1 : 1 + int(made.blocks[0, 0]), :3].tolist()
    assert len(found) <= made.most
    wanted, first = [], 0
    for expert in range(count):
        end = first + int((flat == expert).sum())
        wanted += [[expert, at, min(at + rows, end)] for at in range(first, end, rows)]
        first = end
    assert found == wanted


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("activation", [None, GPT_OSS], ids=["silu", "clamped"])
@pytest.mark.parametrize("sizes", [(64, 96), (40, 24)], ids=str)
@pytest.mark.parametrize("kind", ["vector", "swapped", "plain", "persistent"])
def test_every_kind_of_plan_matches_torch(
    kind: str, sizes: tuple[int, int], activation: ExpertActivation, described: bool
) -> None:
    from atom_ops.triton_impl.experts.expert_plans import (
        MANY,
        ExpertPlan,
        GroupedPlan,
        GroupedTile,
        VectorPlan,
        VectorTile,
    )
    from atom_ops.triton_impl.experts.experts import multiply

    tile = GroupedTile(32, 32, 4, 2, persistent=kind == "persistent")
    plans: dict[str, ExpertPlan] = {
        "vector": VectorPlan(MANY, VectorTile(4, 32, 4), VectorTile(8, 16, 4)),
        "swapped": GroupedPlan(MANY, 16, tile, tile),
    }
    plan = plans.get(kind, GroupedPlan(MANY, 64, tile, tile))
    weights = weights_of(6, *sizes, activation is not None)
    for tokens in (1, 3 if kind == "vector" else 40):
        ids, topk_weights = routed(tokens, 5, 3)
        x = torch.randn(tokens, sizes[0])
        found = multiply(plan, x, ids, topk_weights, weights, activation, described)
        wanted = experts.reference(x, ids, topk_weights, weights, activation)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 7, 30])
def test_padding_and_unknown_experts_do_not_disturb_real_rows(tokens: int) -> None:
    run = experts.providers["triton"].function
    weights = weights_of(12, 40, 24, True)
    ids, topk_weights = routed(tokens + 2, 12, 3)
    x = torch.randn(tokens + 2, 40)
    x[tokens:] = float("nan")
    ids[tokens + 1] = torch.tensor([-1, 12, 1 << 40])
    wanted = experts.reference(x[:tokens], ids[:tokens], topk_weights[:tokens], weights, GPT_OSS)
    found = run(x, ids, topk_weights, weights, GPT_OSS)
    torch.testing.assert_close(found[:tokens], wanted, atol=1e-4, rtol=1e-4)
    assert not found[tokens + 1].any()
    assert run(x[:0], ids[:0], topk_weights[:0], weights, GPT_OSS).shape == (0, 40)


def test_a_rows_bits_do_not_depend_on_the_batch() -> None:
    """From the first row on: in numpy's matmul a row's bits depend on its index in the tile."""
    run = experts.providers[BATCH_INVARIANT].function
    weights = weights_of(3, 64, 48, False)
    ids, topk_weights = torch.tensor([[0, 2]]).repeat(70, 1), torch.rand(70, 2)
    x = torch.randn(70, 64)
    together = run(x, ids, topk_weights, weights, None)
    for rows in (slice(0, 1), slice(0, 17), slice(64, 70)):
        assert torch.equal(run(x[rows], ids[rows], topk_weights[rows], weights, None), together[rows]), rows
