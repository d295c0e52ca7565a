"""Collectives between real processes, and alone."""

import time

import pytest
import torch

from atom_ops import add_rms_norm
from parallel.communicator import Communicator
from tests.helpers.ranks import Ranks


@pytest.mark.timeout(120)
def test_collectives_of_two_processes(ranks: Ranks) -> None:
    ranks.start(
        """
        comm = mesh.tp
        x = torch.arange(6.0).view(2, 3) * (rank + 1)
        assert comm.all_reduce(x) is x
        assert x.tolist() == [[0, 3, 6], [9, 12, 15]]

        sizes = [3, 2]
        mine = torch.arange(2 * sizes[rank]).view(2, -1) + 100 * rank
        whole = comm.all_gather_last_dim(mine, sizes)
        assert whole.tolist() == [[0, 1, 2, 100, 101], [3, 4, 5, 102, 103]], whole

        from atom_ops import add_rms_norm
        partial, residual, weight = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
        expected = add_rms_norm(partial * 3, residual, weight[0], 1e-5)
        found = comm.all_reduce_add_rms_norm(partial * (rank + 1), residual, weight[0], 1e-5)
        torch.testing.assert_close(found, expected)

        half = torch.full((4,), 0.5 + rank, dtype=torch.bfloat16)
        assert comm.all_reduce(half).tolist() == [2.0] * 4

        mesh.close()
        try:
            comm.all_reduce(half)
        except RuntimeError as error:
            assert str(error) == f"rank {rank} of 2 has no process group: not joined, or closed"
            print("done", comm.rank, comm.size)
        """,
        tp=2,
    )
    assert ranks.outputs() == ["done 0 2\n", "done 1 2\n"]


@pytest.mark.timeout(120)
def test_rows_are_gathered_and_their_sums_scattered(ranks: Ranks) -> None:
    ranks.start(
        """
        comm = mesh.ep
        for sizes in ([2, 2, 2], [3, 0, 1], [0, 0, 2]):
            first = sum(sizes[:rank])
            expected = torch.arange(sum(sizes) * 2.0).view(-1, 2)
            mine = expected[first : first + sizes[rank]]
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                whole = comm.all_gather_rows(mine.to(dtype), sizes)
                assert whole.tolist() == expected.tolist() and whole.dtype == dtype, (sizes, whole)
            summed = comm.reduce_scatter_rows(expected * 2.0**rank, sizes)
            assert summed.tolist() == (mine * 7).tolist(), (sizes, summed)
        mesh.close()
        """,
        dp=3,
    )
    ranks.outputs()


@pytest.mark.timeout(120)
def test_sums_have_the_same_bits_on_every_rank(ranks: Ranks) -> None:
    ranks.start(
        """
        import hashlib
        x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
        print(hashlib.sha256(mesh.tp.all_reduce(x).numpy().tobytes()).hexdigest())
        mesh.close()
        """,
        tp=3,
    )
    assert len(set(ranks.outputs())) == 1


@pytest.mark.timeout(120)
def test_a_rank_that_died_is_noticed(ranks: Ranks) -> None:
    ranks.start(
        """
        mesh.tp.all_reduce(torch.ones(1))
        if rank == 1:
            import os; os._exit(3)
        mesh.tp.all_reduce(torch.ones(1))
        """,
        tp=2,
        timeout=5.0,
    )
    started = time.monotonic()
    (status, _, err), (other, _, _) = ranks.finish()
    assert time.monotonic() - started < 45
    assert (status, other) == (1, 3), err
    assert "RuntimeError" in err or "DistBackendError" in err


def test_one_rank_makes_no_call() -> None:
    comm, x = Communicator(), torch.ones(2, 3)
    assert comm.all_reduce(x) is x
    found, expected = (norm(x, x, x[0], 1e-5) for norm in (comm.all_reduce_add_rms_norm, add_rms_norm))
    assert all(map(torch.equal, found, expected))
    assert comm.all_gather_last_dim(x, [3]) is x
    assert comm.all_gather_rows(x, [2]) is x
    assert comm.reduce_scatter_rows(x, [2]) is x


class _OneToken:
    """Peer memory for one token, whose results are recognised."""

    def fits(self, x: torch.Tensor) -> bool:
        return x.shape[0] == 1

    def all_reduce_add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x_TD * 7, residual_TD

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x * 5

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack((x, x * 3))


def test_peer_memory_computes_what_fits_unless_the_fused_norm_is_off() -> None:
    x = torch.ones(2, 4)
    expected, _ = add_rms_norm(x, x, x[0], 1e-5)
    for fused, tokens, found in ((True, 1, x * 7), (True, 2, expected), (False, 1, expected)):
        rows = x[:tokens].clone()
        comm = Communicator(peers=_OneToken(), fused_norm=fused)
        normed, _ = comm.all_reduce_add_rms_norm(rows, rows, x[0], 1e-5)
        torch.testing.assert_close(normed, found[:tokens])
    assert comm.all_reduce(x[:1]).tolist() == [[5] * 4]
    two = Communicator(0, 2, peers=_OneToken())
    assert two.all_gather_last_dim(x[:1], [4, 4]).tolist() == [[1] * 4 + [3] * 4]
    assert two.all_gather_rows(x[:1], [1, 1]).tolist() == [[1] * 4, [3] * 4]


def test_ranks_without_a_process_group_can_be_described_but_not_called() -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 has no process group"):
        Communicator(1, 2).all_reduce(torch.ones(1))


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_beyond_the_size_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not among {size} ranks"):
        Communicator(rank, size)
