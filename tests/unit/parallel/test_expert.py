"""Dispatch and combine between processes: the same sums as in one process."""

import pytest
import torch

from parallel.communicator import Communicator
from parallel.expert import GatherDispatch, LocalDispatch, expert_dispatch
from parallel.mesh import Mesh
from tests.helpers.ranks import Ranks

CPU = torch.device("cpu")
LAYER = """
    from atom_ops import ExpertWeights, experts
    from parallel.expert import expert_dispatch

    X, D, F, J = 7, 16, 8, 3
    torch.manual_seed(5)
    gate_up, down = torch.randn(X, 2 * F, D) / 4, torch.randn(X, D, F) / 4
    biases = torch.randn(X, 2 * F), torch.randn(X, D)
    tokens = TOKENS
    inputs = []
    for count in tokens:  # of every data-parallel rank
        ids = torch.rand(count, X).topk(J).indices
        inputs.append((torch.randn(count, D), ids, torch.rand(count, J)))
    wanted = [experts(*each, ExpertWeights(gate_up, down, *biases)) for each in inputs]

    dispatch = expert_dispatch(mesh, True)
    first, count = dispatch.local_experts(X)
    mine = slice(first, first + count)
    local = ExpertWeights(gate_up[mine], down[mine], *(each[mine] for each in biases), complete=False)
    for turn in range(2):
        dispatch.plan(tokens)
        x, ids, weights = dispatch.dispatch(*inputs[mesh.dp.rank])
        partial = dispatch.combine(experts(x, ids - first, weights, local))
        found = mesh.tp.all_reduce(partial)
        torch.testing.assert_close(found, wanted[mesh.dp.rank], atol=1e-5, rtol=1e-5)
    print(count, x.shape[0])
    mesh.close()
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("tp", "dp", "tokens"),
    [(2, 1, [5]), (1, 2, [4, 4]), (1, 2, [6, 0]), (2, 2, [3, 5]), (1, 4, [1, 0, 9, 2])],
)
def test_the_sums_are_those_of_one_process(tp: int, dp: int, tokens: list[int], ranks: Ranks) -> None:
    ranks.start(LAYER.replace("TOKENS", str(tokens)), tp, dp)
    outputs = [tuple(map(int, out.split())) for out in ranks.outputs()]
    assert sum(count for count, _ in outputs) == 7 and max(outputs)[0] - min(outputs)[0] <= 1
    assert {seen for _, seen in outputs} == {sum(tokens)}


def test_one_rank_dispatches_nothing() -> None:
    dispatch = expert_dispatch(Mesh(CPU), expert_parallel=True)
    assert isinstance(dispatch, LocalDispatch) and dispatch.local_experts(7) == (0, 7)
    x, ids, weights = torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    routed = dispatch.dispatch(x, ids, weights)
    assert routed.x_MD is x and routed.ids_MJ is ids and routed.weights_MJ is weights
    assert dispatch.combine(x) is x


def test_without_the_flag_every_rank_has_every_expert() -> None:
    mesh = Mesh(CPU, tp=Communicator(1, 2), ep=Communicator(1, 2))
    assert expert_dispatch(mesh, expert_parallel=False).local_experts(7) == (0, 7)
    assert expert_dispatch(mesh, expert_parallel=True).local_experts(7) == (4, 3)


def test_fewer_experts_than_ranks_are_refused() -> None:
    dispatch = expert_dispatch(Mesh(CPU, tp=Communicator(0, 4), ep=Communicator(0, 4)), True)
    with pytest.raises(ValueError, match="3 experts cannot be spread over 4 ranks"):
        dispatch.local_experts(3)


def test_tokens_that_were_not_planned_are_refused() -> None:
    dispatch = GatherDispatch(Mesh(CPU, dp=Communicator(1, 2), ep=Communicator(1, 2)))
    inputs = torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(ValueError, match="data-parallel rank 1 dispatches 3 tokens: not as planned"):
        dispatch.dispatch(*inputs)
    dispatch.plan([3, 2])
    with pytest.raises(ValueError, match="data-parallel rank 1 dispatches 3 tokens: not as planned"):
        dispatch.dispatch(*inputs)
    with pytest.raises(ValueError, match="3 token counts for 2 data-parallel ranks"):
        dispatch.plan([1, 1, 1])
