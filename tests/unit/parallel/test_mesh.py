"""The groups of a mesh, and how its ranks meet."""

import time

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from atom.shared.messages.launch import Rendezvous
from benchmarks.ranks.rendezvous import open_rendezvous
from parallel.mesh import MeshShape, join_mesh
from tests.helpers.parallel.ranks import DEADLINE_S, Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "tp", "dp", "ep"),
    [
        (MeshShape(), [(0,)], [(0,)], [(0,)]),
        (MeshShape(tp=3), [(0, 1, 2)], [(0,), (1,), (2,)], [(0, 1, 2)]),
        (MeshShape(dp=2), [(0,), (1,)], [(0, 1)], [(0, 1)]),
        (MeshShape(2, 2), [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1, 2, 3)]),
        (
            MeshShape(2, 3),
            [(0, 1), (2, 3), (4, 5)],
            [(0, 2, 4), (1, 3, 5)],
            [(0, 1, 2, 3, 4, 5)],
        ),
    ],
    ids=str,
)
def test_the_ranks_of_each_group(shape: MeshShape, tp: object, dp: object, ep: object) -> None:
    assert (shape.groups("tp"), shape.groups("dp"), shape.groups("ep")) == (tp, dp, ep)


def test_ranks_that_split_the_latent_cache_are_neighbours() -> None:
    shape = MeshShape(tp=4, dp=2, dcp=2)
    assert shape.groups("dcp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert MeshShape(tp=4, dcp=4).groups("dcp") == MeshShape(tp=4).groups("tp")
    assert MeshShape(tp=2).groups("dcp") == [(0,), (1,)]
    with pytest.raises(ValueError, match="must divide tp 4: dcp 3"):
        MeshShape(tp=4, dcp=3)


def test_empty_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1: tp 2, dp 0"):
        MeshShape(2, 0)


@pytest.mark.timeout(DEADLINE_S + 20)
def test_four_processes_as_tp_2_by_dp_2(ranks: Ranks) -> None:
    ranks.start(
        """
        import torch.distributed as dist
        tp, dp = rank % 2, rank // 2
        assert [(g.rank, g.size) for g in (mesh.tp, mesh.dp, mesh.ep)] == [(tp, 2), (dp, 2), (rank, 4)]
        value = torch.tensor([10.0**rank])
        assert mesh.tp.all_reduce(value.clone()).item() == (11, 1100)[dp]
        assert mesh.dp.all_reduce(value.clone()).item() == (101, 1010)[tp]
        assert mesh.ep.all_reduce(value.clone()).item() == 1111
        own = torch.tensor([rank])
        assert mesh.tp.all_gather_rows(own, [1, 1]).tolist() == ([0, 1], [2, 3])[dp]
        assert mesh.dp.all_gather_rows(own, [1, 1]).tolist() == ([0, 2], [1, 3])[tp]
        assert mesh.ep.all_gather_rows(own, [1] * 4).tolist() == [0, 1, 2, 3]
        assert mesh.host.all_gather([rank, 7]) == [[0, 7], [1, 7], [2, 7], [3, 7]]
        # tp, dp, the world, which is ep, too, and the host group
        assert len(dist.distributed_c10d._world.pg_map) == 4
        mesh.close()
        assert not dist.is_initialized()
        """,
        tp=2,
        dp=2,
    )
    ranks.outputs()


@pytest.mark.timeout(DEADLINE_S + 20)
def test_names_with_the_same_ranks_share_a_process_group(ranks: Ranks) -> None:
    ranks.start(
        """
        import torch.distributed as dist
        assert len(dist.distributed_c10d._world.pg_map) == 1
        assert mesh.dp.all_reduce(x := torch.ones(1)) is x
        assert mesh.ep.all_reduce(torch.ones(1)).item() == 2
        mesh.close()
        """,
        tp=2,
    )
    ranks.outputs()


def test_one_rank_makes_no_process_group() -> None:
    mesh = join_mesh(MeshShape(), 0, None, CPU)
    assert mesh.device == CPU and {mesh.tp.size, mesh.dp.size, mesh.ep.size} == {1}
    assert not dist.is_initialized()
    mesh.close()
    with open_rendezvous(1) as places:
        assert places == [None]


@pytest.mark.parametrize(
    ("rank", "where", "text"),
    [
        (2, Rendezvous("127.0.0.1", 1), "rank 2 is not among 2 ranks"),
        (1, None, "rank 1 of 2 was given no rendezvous"),
        (0, Rendezvous("127.0.0.1", 1), "rank 0, and no other rank, hosts the store"),
        (1, Rendezvous("127.0.0.1", 1, listen_fd=3), "rank 0, and no other rank, hosts the store"),
    ],
)
def test_wrong_arguments_are_refused(rank: int, where: Rendezvous | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        join_mesh(MeshShape(2), rank, where, CPU)


def last_line(err: str) -> str:
    return err.strip().rpartition("\n")[2]


@pytest.mark.timeout(DEADLINE_S + 20)
def test_a_rank_that_never_comes_is_named(ranks: Ranks) -> None:
    with open_rendezvous(3, life=4) as (host, other, _):
        assert host is not None and other is not None
        ranks.start_one("", 0, host, (3,), 3.0)
        ranks.start_one("", 1, other, (3,), 3.0)
    ends = ranks.finish()
    assert [status for status, _, _ in ends] == [1, 1]
    for rank, (_, _, err) in enumerate(ends):
        assert last_line(err) == (
            f"RuntimeError: rank {rank} of 3, life 4, at 127.0.0.1:{host.port}, waited 3 s for rank 2"
        )


@pytest.mark.timeout(DEADLINE_S + 20)
def test_a_worker_of_an_earlier_life_is_not_let_in(ranks: Ranks) -> None:
    """It knows the port, comes with the number of a missing rank, and is not taken for it."""
    with open_rendezvous(2, life=2) as (host, other):
        assert host is not None and other is not None
        ranks.start_one("", 1, replace(other, life=1), (2,), 3.0)
        ranks.start_one("print(mesh.tp.all_reduce(torch.ones(1)).item()); mesh.close()", 0, host, (2,))
        ranks.start_one("print(mesh.tp.all_reduce(torch.ones(1)).item()); mesh.close()", 1, other, (2,))
    (stale, _, err), *good = ranks.finish()
    assert stale == 1 and "rank 1 of 2, life 1, at " in last_line(err)
    assert last_line(err).endswith(("waited 3 s for rank 0", "has it ended?")), err
    assert [(status, out) for status, out, _ in good] == [(0, "2.0\n")] * 2


@pytest.mark.timeout(60)
def test_a_host_that_never_answers_is_an_error() -> None:
    with open_rendezvous(2) as (_, other):
        assert other is not None
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"rank 1 of 2, life 0, at .* cannot reach rank 0 within 1 s"):
            join_mesh(MeshShape(2), 1, other, CPU, timeout=1.0)
        assert time.monotonic() - started < 10


@pytest.mark.timeout(DEADLINE_S + 20)
def test_the_store_dies_with_rank_0(ranks: Ranks) -> None:
    """Rank 0 ends before it meets rank 1, which sees it long before its own deadline."""
    with open_rendezvous(2) as (host, other):
        assert host is not None and other is not None
        ranks.start_one("", 0, host, (2,), 2.0)
        ranks.start_one("", 1, replace(other, life=9), (2,), 40.0)
    ranks.join()
    started = time.monotonic()
    (_, _, _), (status, _, err) = ranks.finish()
    assert status == 1 and last_line(err).endswith("lost rank 0, which hosts the store: has it ended?")
    assert time.monotonic() - started < 30
