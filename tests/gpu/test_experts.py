"""Routing and experts in torch on a GPU: as exact as on the CPU, without synchronisation."""

from typing import Any

import pytest
import torch

from atom_ops import backend, experts, route
from atom_ops.op import REFERENCE, Case, Op
from tests.helpers.op_cases import CPU, DTYPES, changed, check

GPU = torch.device("cuda", 0)
ROWS = [(op, case) for op in (experts, route) for case in op.cases]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize(("op", "case"), ROWS, ids=[f"{op.name}-{case.label}" for op, case in ROWS]),
]


def test_agrees_with_the_cpu(op: Op[..., Any], case: Case, dtype: torch.dtype) -> None:
    backend.resolve(CPU)
    check(op, op.providers[REFERENCE], dtype, case, GPU)


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
