"""Checks run by every rank of one process group: each form of dispatch against the experts of one process."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from atom_ops import ExpertWeights, experts
from parallel.expert import ExpertDispatch, mori_plan
from parallel.expert.all_to_all import AllToAllDispatch
from parallel.expert.choose import ChosenDispatch, Crossovers
from parallel.expert.gather import GatherDispatch
from parallel.expert.mori import MoriDispatch
from parallel.expert.padded import PaddedDispatch
from parallel.mesh import Mesh
from tests.helpers.parallel.simulated_mori import install

D, F = 16, 8
RANDOM_CASES = 3
MOST_TOKENS = 9


@dataclass(frozen=True)
class Case:
    """Tokens of every data-parallel rank, and the experts selected for each of them."""

    tokens: Sequence[int]
    experts: int
    ids: Sequence[Tensor]


def meshes(mesh: Mesh) -> dict[str, Mesh]:
    """The meshes that the groups of one of 2 x 2 ranks can form, by their tp x dp."""
    device, meeting = mesh.device, mesh.meeting
    return {
        "2x2": mesh,
        "4x1": Mesh(device, tp=mesh.ep, ep=mesh.ep, meeting=meeting),
        "1x4": Mesh(device, dp=mesh.ep, ep=mesh.ep, meeting=meeting),
        "2x1": Mesh(device, tp=mesh.tp, ep=mesh.tp, meeting=meeting),
        "1x2": Mesh(device, dp=mesh.tp, ep=mesh.tp, meeting=meeting),
    }


def forms(mesh: Mesh, case: "Case") -> Iterator[ExpertDispatch]:
    """The forms that can spread the case's experts."""
    yield GatherDispatch(mesh)
    yield PaddedDispatch(mesh)
    yield AllToAllDispatch(mesh)
    yield ChosenDispatch(mesh, Crossovers(padded=6, all_to_all=12))
    if case.experts % mesh.ep.size == 0:
        install(mesh)
        yield MoriDispatch(mesh, MOST_TOKENS)
        yield MoriDispatch(mesh, MOST_TOKENS, nodes=2)
        with patch.dict(os.environ, {"MORI_ENABLE_SDMA": "1"}):
            asynchronous = MoriDispatch(mesh, MOST_TOKENS, nodes=2)
        yield asynchronous


def cases(dp: int) -> Iterator[Case]:
    """Chosen ones, then random ones, of `dp` data-parallel ranks; the same on every rank."""
    generator = torch.Generator().manual_seed(dp)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def case(tokens: Sequence[int], experts: int, chosen: int, padded: float = 0.0) -> Case:
        ids = [torch.rand(count, experts, generator=generator).topk(chosen).indices for count in tokens]
        for each in ids:
            each[torch.rand(each.shape, generator=generator) < padded] = -1 if number(0, 1) else experts
        return Case(tokens, experts, ids)

    yield Case([5] * dp, 7, [torch.full((5, 1), 6) for _ in range(dp)])  # all tokens to one expert
    yield case([0] * (dp - 1) + [3], 7, 3)
    yield case([0] * dp, 7, 3)
    yield case([MOST_TOKENS, *range(1, dp)], 8, 8)
    yield case([4] * dp, 4, 2, padded=1.0)
    for _ in range(RANDOM_CASES):
        experts = number(4, 11)
        yield case([number(0, MOST_TOKENS) for _ in range(dp)], experts, number(1, experts), number(0, 2) / 4)


def weights_of(count: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(count)
    gate_up = torch.randn(count, 2 * F, D, generator=generator) / 4
    down = torch.randn(count, D, F, generator=generator) / 4
    biases = (torch.randn(count, size, generator=generator) for size in (2 * F, D))
    return ExpertWeights(gate_up, down, *biases, complete=False)


def check(mesh: Mesh) -> Counter[str]:
    """Runs every form on every mesh; returns the comparisons of each form. Raises AssertionError."""
    compared: Counter[str] = Counter()
    mori_plan.LOW_LATENCY_TOKENS = 3  # so that the cases run both kinds of kernels
    for name, each in meshes(mesh).items():
        for number, case in enumerate(cases(each.dp.size)):
            for dispatch in forms(each, case):
                form = type(dispatch).__name__
                if isinstance(dispatch, MoriDispatch):
                    form = "+".join(each.name for each in dispatch._kernels)
                try:
                    _check(dispatch, each, case)
                except Exception as error:
                    raise AssertionError(f"mesh {name}, {form}, case {number}") from error
                compared[form] += 1
    return compared


def _check(dispatch: ExpertDispatch, mesh: Mesh, case: Case) -> None:
    generator = torch.Generator().manual_seed(1 + mesh.dp.rank)
    tokens, ids = case.tokens[mesh.dp.rank], case.ids[mesh.dp.rank]
    x = torch.randn(tokens, D, generator=generator)
    topk_weights = torch.rand(ids.shape, generator=generator)
    whole = weights_of(case.experts)
    wanted = experts(x, ids, topk_weights, whole)
    first, count = dispatch.local_experts(case.experts)
    here = slice(first, first + count)
    assert isinstance(whole.gate_up_XOD, Tensor) and isinstance(whole.down_XDF, Tensor)
    assert whole.gate_up_bias_XO is not None and whole.down_bias_XD is not None
    local = ExpertWeights(
        whole.gate_up_XOD[here], whole.down_XDF[here], whole.gate_up_bias_XO[here],
        whole.down_bias_XD[here], complete=False,
    )  # fmt: skip
    dispatch.plan(case.tokens, eager=True)
    x_MD, topk_ids_MJ, topk_weights_MJ = dispatch.dispatch(x, ids, topk_weights, case.experts)
    assert len(x_MD) <= mesh.ep.size * -(-max(case.tokens) // mesh.tp.size), "bounded by the fullest rank"
    partial = dispatch.combine(experts(x_MD, topk_ids_MJ - first, topk_weights_MJ, local))
    found = mesh.tp.all_reduce(partial.contiguous())
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
