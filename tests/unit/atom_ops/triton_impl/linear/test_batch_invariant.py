"""Rows computed alone and together, bit by bit, in Triton's interpreter."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import atom_ops
from atom_ops import backend
from atom_ops.op import REGISTRY
from atom_ops.ops.attention.attention_plan import BATCH_INVARIANT_SPLIT
from atom_ops.ops.linear.linear import BATCH_INVARIANT
from atom_ops.triton_impl.hardware import target
from tests.helpers.kernels.paged_step import CPU, Step

DTYPES = (torch.float32, torch.float16)
interpreted = pytest.mark.skipif(not target.INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.fixture
def invariant() -> Iterator[None]:
    backend.resolve(CPU, ["triton"], batch_invariant=True)
    yield
    backend.resolve(CPU)


@pytest.mark.skipif(target.INTERPRETED, reason="the interpreter offers it")
def test_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"no batch-invariant kernels on cpu: they need a GPU"):
        backend.resolve(CPU, batch_invariant=True)
    assert BATCH_INVARIANT not in atom_ops.linear.order


@interpreted
def test_only_batch_invariant_providers_are_used(invariant: None) -> None:
    assert atom_ops.linear.order == (BATCH_INVARIANT, "torch")
    taken = [op.providers[name] for op in REGISTRY.values() for name in op.order]
    assert all(provider.batch_invariant for provider in taken)
    assert "triton" in atom_ops.paged_attention.order
    backend.resolve(CPU, ["triton"])
    assert BATCH_INVARIANT not in atom_ops.linear.order


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(70, 49), (256, 300)])
def test_gemm(invariant: None, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(150, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    together = atom_ops.linear(x, weight, bias)
    assert not atom_ops.linear.ran_reference
    # From the beginning of a tile: in numpy's matmul a row's bits depend on its index in the tile.
    for rows in (slice(0, 1), slice(64, 65), slice(0, 17), slice(64, 150), slice(128, 150)):
        assert torch.equal(atom_ops.linear(x[rows], weight, bias), together[rows]), rows
    assert atom_ops.linear(x[:0], weight, bias).shape == (0, outputs)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_len", [1, 40])
@pytest.mark.parametrize("window", [0, 200, 600])
def test_attention(invariant: None, window: int, query_len: int, dtype: torch.dtype) -> None:
    """One phase only: a decode and a prompt have other indices in a tile, which changes numpy's bits."""
    if query_len > 1 and window == 600:
        pytest.skip("takes the interpreter long; decodes have this window, and prompts have the others")
    lens = [600, 70, 1030]
    step = Step(lens, lens, 4, 2, dtype=dtype, cache_dtype=dtype, window=window, sinks=window > 0)

    def attended(rows: list[int]) -> torch.Tensor:
        plan = atom_ops.plan_attention(
            np.full(len(rows), query_len, np.int32), step.context_lens[rows], step.table[rows], CPU
        )
        plan = dataclasses.replace(plan, split_tokens=BATCH_INVARIANT_SPLIT)
        ends = torch.tensor(lens).cumsum(0)[rows].tolist()
        q = torch.cat([step.q[end - query_len : end] for end in ends])
        return atom_ops.paged_attention(q, step.cache, plan, step.rule).view(len(rows), -1)

    together = attended([0, 1, 2])
    for row in range(3):
        assert torch.equal(attended([row])[0], together[row]), row
