"""What MORI is asked for, in one process; several ranks are in test_expert."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from parallel.communicator import Communicator
from parallel.expert import expert_dispatch, mori, mori_plan
from parallel.expert.mori import MoriDispatch
from parallel.expert.mori_plan import (
    HEAP_VARIABLE,
    LOW_LATENCY_TOKENS,
    Launch,
    Tokens,
    kernels_for,
    layout_problem,
    op_kernels,
    reserve_heap,
    settings_problem,
    symmetric_bytes,
)
from parallel.mesh import Mesh
from parallel.rendezvous import MeetingPoint
from tests.helpers.parallel import simulated_mori
from tests.helpers.parallel.mori_swaps import SWAPS
from tests.helpers.parallel.simulated_mori import Simulation, Swap

CPU = torch.device("cpu")
DEEPSEEK = Tokens(7168, torch.bfloat16, 8, 256)
GIB = 1 << 30
EXPERTS, HIDDEN, CHOSEN, MOST = 6, 16, 2, 9


class Meeting:
    """The meeting point of one rank."""

    def __init__(self) -> None:
        self.store = dist.HashStore()


def mesh_of_one() -> Mesh:
    return Mesh(CPU, meeting=cast("MeetingPoint", Meeting()))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Simulation]]:
    """`simulated_mori.install`, undone afterwards."""
    for name in ("mori", "mori.ops", "mori.ops.dispatch_combine", "mori.shmem"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    monkeypatch.setattr(mori_plan, "LOW_LATENCY_TOKENS", 3)
    for variable in (HEAP_VARIABLE, "MORI_SHMEM_MODE", "MORI_ENABLE_SDMA", "MORI_ENABLE_RAIL_ONLY"):
        monkeypatch.setenv(variable, "")
    yield simulated_mori.install
    mori._join.cache_clear()


@pytest.mark.parametrize(
    ("nodes", "sdma", "names"),
    [
        (1, "", ["IntraNode", "IntraNode"]),
        (2, "0", ["InterNodeV1LL", "InterNodeV1"]),
        (1, "1", ["AsyncLL", "IntraNode"]),
        (2, "1", ["AsyncLL", "InterNodeV1"]),
    ],
)
def test_kernels_are_chosen_by_nodes_and_tokens(
    nodes: int, sdma: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORI_ENABLE_SDMA", sdma)
    few, many = kernels_for(nodes, 8192, 304, 8 * nodes)
    assert [few.name, many.name] == names
    assert (few.max_tokens, many.max_tokens) == (LOW_LATENCY_TOKENS, 8192)
    (alone,) = kernels_for(nodes, 64, 304, 8 * nodes)
    assert (alone.name, alone.max_tokens) == (few.name, 64)
    # One op for each kernel type, which serves the most tokens.
    ops = op_kernels((few, many))
    assert len(ops) == len(set(names)) and ops[-1] == many
    monkeypatch.setenv("MORI_ENABLE_RAIL_ONLY", "yes")
    assert (kernels_for(2, 8192, 304, 16)[0].name) == "InterNodeV1LL"


def test_blocks_are_never_more_than_compute_units() -> None:
    """They wait for one another in the kernels; a partition of an MI300X has 38."""
    for nodes in (1, 2):
        for each in kernels_for(nodes, 8192, 38, 8):
            assert each.launch.blocks <= 38
    assert Launch(64, 32, 8).fitting(38) == Launch(38, 19, 8)
    assert Launch(128, 0, 16).fitting(304) == Launch(128, 0, 16)


@pytest.mark.parametrize(
    ("ranks", "nodes", "fits"), [(8, 1, True), (16, 2, True), (6, 1, False), (8, 3, False), (16, 1, False)]
)
def test_gpus_of_a_node_are_a_power_of_two(ranks: int, nodes: int, fits: bool) -> None:
    assert (layout_problem(ranks, nodes) is None) == fits


def test_mori_must_launch_as_many_blocks_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_problem() is None
    monkeypatch.setenv("MORI_EP_LAUNCH_CONFIG_MODE", "auto")
    assert "leave it unset" in str(settings_problem())


def test_symmetric_memory_grows_with_tokens_and_ways() -> None:
    one, two = (symmetric_bytes(kernels_for(nodes, 8192, 304, 8), DEEPSEEK, 8, nodes) for nodes in (1, 2))
    received = 8 * 8192 * 7168 * 2
    assert 2 * received < one < 2.5 * received < two
    assert symmetric_bytes(kernels_for(1, 4096, 304, 8), DEEPSEEK, 8, 1) < one


def test_the_heap_fits_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEAP_VARIABLE, "")
    monkeypatch.delenv("MORI_SHMEM_MODE", raising=False)
    reserve_heap(5 * GIB // 2)
    assert os.environ[HEAP_VARIABLE] == "3G"
    reserve_heap(4 * GIB)  # of the next layout of a plan
    assert os.environ[HEAP_VARIABLE] == "4G"
    monkeypatch.setenv(HEAP_VARIABLE, "2560M")
    reserve_heap(5 * GIB // 2)
    monkeypatch.setenv(HEAP_VARIABLE, "2G")
    with pytest.raises(
        ValueError, match=r"HEAP_SIZE=2G is too small: .* 2\.5 GiB on each rank\. Set it to 3G"
    ):
        reserve_heap(5 * GIB // 2)
    monkeypatch.setenv("MORI_SHMEM_MODE", "isolation")
    reserve_heap(5 * GIB // 2)
    monkeypatch.delenv("MORI_SHMEM_MODE")
    monkeypatch.setenv(HEAP_VARIABLE, "plenty")
    with pytest.raises(ValueError, match="HEAP_SIZE=plenty is no size: write 3G"):
        reserve_heap(5 * GIB // 2)


def test_tokens_that_mori_does_not_send_are_refused_before_weights_are_loaded(
    install: Callable[..., Simulation],
) -> None:
    mesh = mesh_of_one()
    install(mesh)
    dispatch = MoriDispatch(mesh, MOST)
    with pytest.raises(ValueError, match=r"MORI sends no torch\.float16; use --dtype bfloat16"):
        dispatch.reserve(HIDDEN, torch.float16, CHOSEN, EXPERTS)
    with pytest.raises(ValueError, match="less than 64 experts each, not 64"):
        dispatch.reserve(HIDDEN, torch.bfloat16, 64, 128)
    dispatch.reserve(HIDDEN, torch.bfloat16, CHOSEN, EXPERTS)
    assert 0 < dispatch.reserved_bytes < GIB
    dispatch.plan([MOST])
    with pytest.raises(ValueError, match="10 tokens in a step: MORI has reserved 9"):
        dispatch.plan([MOST + 1])


def test_a_layout_that_mori_cannot_connect_is_refused_or_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("parallel.expert.choose.mori_problem", lambda device: None)
    three = Mesh(CPU, dp=Communicator(0, 3), ep=Communicator(0, 3))
    with pytest.raises(ValueError, match="--all2all-backend mori: MORI needs 1, 2, 4 or 8 GPUs on each node"):
        expert_dispatch(three, True, "mori", MOST)
    assert not isinstance(expert_dispatch(three, True, "auto", MOST), MoriDispatch)


def test_a_plan_for_gpus_that_are_not_here_reserves_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEAP_VARIABLE, "")
    mesh = Mesh(torch.device("meta"), dp=Communicator(0, 8), ep=Communicator(0, 8))
    dispatch = expert_dispatch(mesh, True, "mori", 8192, planned_for=torch.device("cuda"))
    assert isinstance(dispatch, MoriDispatch)
    dispatch.reserve(*DEEPSEEK)
    assert dispatch.reserved_bytes > GIB and os.environ[HEAP_VARIABLE] == "2G"
    with pytest.raises(ValueError, match="MORI needs an AMD GPU"):
        expert_dispatch(mesh, True, "mori", 8192, planned_for=CPU)


def run(nodes: int, sdma: bool, install: Callable[..., Simulation], swap: Swap | None = None) -> Simulation:
    """Few tokens, then many; every token comes back once."""
    mesh = mesh_of_one()
    simulation = install(mesh, swap)
    os.environ["MORI_ENABLE_SDMA"] = str(int(sdma))
    mori._join.cache_clear()
    dispatch = MoriDispatch(mesh, MOST, nodes)
    generator = torch.Generator().manual_seed(1)
    dispatch.reserve(HIDDEN, torch.float32, CHOSEN, EXPERTS)
    try:
        for tokens in (2, MOST, 0, 3):
            x = torch.randn(tokens, HIDDEN, generator=generator)
            ids = torch.rand(tokens, EXPERTS, generator=generator).topk(CHOSEN).indices
            weights = torch.rand(tokens, CHOSEN, generator=generator)
            dispatch.plan([tokens])
            routed = dispatch.dispatch(x, ids, weights, EXPERTS)
            order = (
                (routed.x_MD.unsqueeze(0) == x.unsqueeze(1)).all(-1).float().argmax(1)
                if tokens
                else ids[:, 0]
            )
            assert torch.equal(routed.topk_ids_MJ[order], ids)
            assert torch.equal(routed.topk_weights_MJ[order], weights)
            found = dispatch.combine(routed.x_MD * 2)
            torch.testing.assert_close(found, 2 * x)
    finally:
        os.environ["MORI_ENABLE_SDMA"] = ""
    return simulation


@pytest.mark.parametrize(("nodes", "sdma"), [(1, False), (1, True)])
def test_every_token_comes_back(nodes: int, sdma: bool, install: Callable[..., Simulation]) -> None:
    calls = run(nodes, sdma, install).calls
    op = "mori.ops.EpDispatchCombineOp"
    kinds = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv") if sdma else ()
    assert {f"{op}.{each}" for each in ("dispatch", "combine", *kinds)} <= set(calls)


@pytest.mark.parametrize("swap", SWAPS, ids="-".join)
def test_a_swap_of_two_arguments_is_found(swap: Swap, install: Callable[..., Simulation]) -> None:
    found: list[Any] = []

    def keep(mesh: Mesh, swap: Swap | None) -> Simulation:
        found.append(install(mesh, swap))
        simulation: Simulation = found[0]
        return simulation

    with pytest.raises((AssertionError, AttributeError, TypeError, RuntimeError, IndexError)):
        run(1, True, keep, swap)
    assert found[0].calls[swap[0]] > 0, "never called"
