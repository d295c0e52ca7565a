"""Dispatch and combine: the same sums as in one process, in every form."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from parallel.communicator import Communicator
from parallel.expert import LocalDispatch, expert_dispatch
from parallel.expert.all_to_all import AllToAllDispatch, owners
from parallel.expert.choose import ChosenDispatch, Crossovers
from parallel.expert.gather import GatherDispatch
from parallel.expert.mori import mori_problem
from parallel.expert.padded import PaddedDispatch
from parallel.expert.rows import packed, unpacked, without_expert
from parallel.mesh import Mesh
from parallel.sharding import split
from tests.helpers.parallel.ranks import Ranks

CPU = torch.device("cpu")
DEADLINE_S = 180


@pytest.fixture(scope="module")
def found() -> Iterator[list[Any]]:
    """What each of four ranks found; they check everything that needs several."""
    ranks = Ranks()
    ranks.start(
        """
        from tests.helpers.parallel import expert_ranks, moving_experts
        found = [expert_ranks.check(mesh), moving_experts.run(mesh)]
        print(msgspec.json.encode(found).decode())
        mesh.close()
        """,
        tp=2,
        dp=2,
        timeout=DEADLINE_S,
    )
    try:
        yield [json.loads(out) for out in ranks.outputs(DEADLINE_S)]
    finally:
        ranks.kill()


@pytest.mark.timeout(DEADLINE_S + 20)
def test_the_sums_are_those_of_one_process(found: list[Any]) -> None:
    """Every form, on the meshes 2 x 2, 4 x 1, 1 x 4, 2 x 1 and 1 x 2: chosen cases, then random ones."""
    for compared, _ in found:
        for few, many in (
            ("IntraNode", "IntraNode"),
            ("InterNodeV1LL", "InterNodeV1"),
            ("AsyncLL", "InterNodeV1"),
        ):
            # On four tensor-parallel ranks each sends so few tokens that one kind of kernels is enough.
            assert compared.pop(few) + compared[f"{few}+{many}"] >= 5 * 3
            assert compared.pop(f"{few}+{many}") >= 4 * 3
        assert len(compared) == 4
        assert set(compared.values()) == {5 * (5 + 3)}


def test_experts_that_move_between_steps_leave_the_sums_as_they_are(found: list[Any]) -> None:
    """And every rank counts the same load, which is more even afterwards."""
    results = [moved for _, moved in found]
    assert all(each == results[0] for each in results)
    before, after, moved = results[0]
    assert moved >= 8 and before > 1.5 and after < 1.3


def test_one_rank_dispatches_nothing() -> None:
    dispatch = expert_dispatch(Mesh(CPU), expert_parallel=True)
    assert isinstance(dispatch, LocalDispatch) and dispatch.local_experts(7) == (0, 7)
    x, ids, weights = torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    dispatch.plan([2])
    routed = dispatch.dispatch(x, ids, weights, 7)
    assert routed.x_MD is x and routed.topk_ids_MJ is ids and routed.topk_weights_MJ is weights
    assert dispatch.combine(x) is x


def test_without_the_flag_every_rank_has_every_expert() -> None:
    mesh = Mesh(CPU, tp=Communicator(1, 2), ep=Communicator(1, 2))
    assert expert_dispatch(mesh, expert_parallel=False).local_experts(7) == (0, 7)
    assert expert_dispatch(mesh, expert_parallel=True).local_experts(7) == (4, 3)


def test_fewer_experts_than_ranks_are_refused() -> None:
    dispatch = expert_dispatch(Mesh(CPU, tp=Communicator(0, 4), ep=Communicator(0, 4)), True)
    with pytest.raises(ValueError, match="3 experts cannot be spread over 4 ranks"):
        dispatch.local_experts(3)


def two_ranks() -> Mesh:
    return Mesh(CPU, dp=Communicator(1, 2), ep=Communicator(1, 2))


@pytest.mark.parametrize("form", [GatherDispatch, PaddedDispatch])
def test_tokens_that_were_not_planned_are_refused(form: type[GatherDispatch | PaddedDispatch]) -> None:
    dispatch = form(two_ranks())
    inputs = torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), 7
    with pytest.raises(ValueError, match="data-parallel rank 1 dispatches 3 tokens: not as planned"):
        dispatch.dispatch(*inputs)
    dispatch.plan([3, 2])
    with pytest.raises(ValueError, match="data-parallel rank 1 dispatches 3 tokens: not as planned"):
        dispatch.dispatch(*inputs)
    with pytest.raises(ValueError, match="3 token counts for 2 data-parallel ranks"):
        dispatch.plan([1, 1, 1])
    with pytest.raises(ValueError, match="AllToAllDispatch cannot be captured in a graph"):
        AllToAllDispatch(two_ranks()).plan([3, 2])


@pytest.mark.parametrize(
    ("tokens", "eager", "form"),
    [
        ([3, 3], False, PaddedDispatch),
        ([3, 4], False, GatherDispatch),
        ([300, 400], False, GatherDispatch),
        ([3, 3], True, PaddedDispatch),
        ([10, 9], True, GatherDispatch),
        ([20, 0], True, AllToAllDispatch),
    ],
)
def test_the_form_is_chosen_by_the_planned_tokens(tokens: list[int], eager: bool, form: type) -> None:
    """Sizes that the host must read are never in a graph."""
    dispatch = ChosenDispatch(two_ranks(), Crossovers(padded=6, all_to_all=20))
    dispatch.plan(tokens, eager)
    assert type(dispatch._form) is form


def test_the_backend_names_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(expert_dispatch(two_ranks(), True, "allgather_reducescatter"), GatherDispatch)
    dispatch = expert_dispatch(two_ranks(), True, "alltoall")
    for eager, form in ((True, AllToAllDispatch), (False, PaddedDispatch)):
        dispatch.plan([100_000, 1], eager)
        assert isinstance(dispatch, ChosenDispatch) and type(dispatch._form) is form
    monkeypatch.setenv("ATOM_ALL2ALL_PADDED_TOKENS", "1")
    monkeypatch.setenv("ATOM_ALL2ALL_EAGER_TOKENS", "2")
    assert Crossovers.from_environment() == Crossovers(1, 2)
    chosen = expert_dispatch(two_ranks(), True)
    assert isinstance(chosen, ChosenDispatch) and chosen._crossovers == Crossovers(1, 2)
    assert isinstance(
        expert_dispatch(Mesh(CPU, tp=Communicator(0, 2), ep=Communicator(0, 2)), True), GatherDispatch
    )


def test_mori_is_refused_elsewhere_than_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--all2all-backend mori: MORI needs an AMD GPU"):
        expert_dispatch(two_ranks(), True, "mori")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    problem = mori_problem(torch.device("cuda"))
    assert problem == "amd-mori is not installed: pip install 'atom-serve[rocm]'"


@pytest.mark.parametrize(("count", "ranks"), [(7, 4), (8, 4), (3, 3), (11, 2)])
def test_the_owner_of_an_expert_is_the_rank_that_has_it(count: int, ranks: int) -> None:
    found = owners(torch.arange(-2, count + 2), count, ranks).tolist()
    wanted = [rank for rank in range(ranks) for _ in range(split(count, ranks, rank)[1])]
    assert found == [ranks, ranks, *wanted, ranks, ranks]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "hidden", "chosen"), [(3, 5, 1), (2, 16, 8), (0, 7, 3)])
def test_a_row_has_all_of_a_token(tokens: int, hidden: int, chosen: int, dtype: torch.dtype) -> None:
    x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, chosen)
    ids = torch.randint(-1, 300, (tokens, chosen))
    rows = packed(x, ids, weights)
    assert rows.shape[1] % 16 == 0
    for found, wanted in zip(unpacked(rows, chosen, hidden, dtype), (x, ids, weights), strict=True):
        assert torch.equal(found, wanted)
    padding = unpacked(without_expert(2, rows, chosen), chosen, hidden, dtype)
    assert padding.topk_ids_MJ.eq(-1).all() and not padding.x_MD.any() and not padding.topk_weights_MJ.any()
