"""Collectives between real processes, and alone."""

import json
import time
from typing import cast

import pytest
import torch
import torch.distributed as dist

from atom_ops import add_rms_norm
from parallel.communicator import Communicator
from tests.aiter_contract import reduce
from tests.helpers.parallel.ranks import DEADLINE_S, Ranks


@pytest.mark.timeout(DEADLINE_S + 20)
def test_collectives_of_three_processes(ranks: Ranks) -> None:
    ranks.start(
        """
        import hashlib
        from atom_ops import add_rms_norm
        comm = mesh.tp
        x = torch.arange(6.0).view(2, 3)
        assert comm.all_reduce(x * (rank + 1)).tolist() == (x * 6).tolist()
        half = torch.full((4,), 0.5 + rank, dtype=torch.bfloat16)
        assert comm.all_reduce(half).tolist() == [4.5] * 4

        # The same bits on every rank.
        mine = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
        print(hashlib.sha256(comm.all_reduce(mine).numpy().tobytes()).hexdigest())

        partial, residual, weight = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
        expected = add_rms_norm(partial * 6, residual, weight[0], 1e-5)
        found = comm.all_reduce_add_rms_norm(partial * (rank + 1), residual, weight[0], 1e-5)
        torch.testing.assert_close(found, expected)

        for rows in (1, 2):
            for sizes in ([3, 2, 2], [2, 2, 2]):
                mine = torch.arange(rows * sizes[rank]).view(rows, -1) + 100 * rank
                whole = comm.all_gather_last_dim(mine, sizes)
                parts = [torch.arange(rows * size).view(rows, -1) + 100 * r for r, size in enumerate(sizes)]
                assert whole.tolist() == torch.cat(parts, 1).tolist(), whole

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
        try:
            comm.all_reduce(half)
        except RuntimeError as error:
            assert str(error) == f"rank {rank} of 3 has no process group: not joined, or closed"
        """,
        tp=3,
    )
    assert len(set(ranks.outputs())) == 1


@pytest.mark.timeout(DEADLINE_S + 20)
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
    ranks.join()
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
    assert comm.all_to_all_rows(x, [2], [2]) is x
    room = torch.zeros(3, 3)
    assert torch.equal(comm.all_to_all_rows(x, [2], [2], room), x) and room.tolist()[:2] == x.tolist()


class _OneToken:
    """Peer memory for one token, whose results are recognised."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def fits(self, x: torch.Tensor) -> bool:
        return x.shape[0] == 1

    fuses_norm = fits

    def all_reduce_add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x_TD * 7, residual_TD


def test_peer_memory_computes_what_fits_unless_the_fused_norm_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.communicator.open_peer_memory", lambda *_: _OneToken())
    monkeypatch.setattr("parallel.communicator.dist.all_reduce", lambda x, group: None)
    x = torch.rand(2, 4)
    alone, _ = add_rms_norm(x, x, x[0], 1e-5)
    summed, _ = add_rms_norm(x * 3, x, x[0], 1e-5)
    for fused, tokens, found in ((True, 1, x * 7), (True, 2, alone), (False, 1, summed)):
        rows = x[:tokens].clone()
        comm = Communicator(0, 2, cast("dist.ProcessGroup", object()), fused_norm=fused)
        comm.open_peers(4, x.dtype, x.device)
        normed, _ = comm.all_reduce_add_rms_norm(rows, rows, x[0], 1e-5)
        torch.testing.assert_close(normed, found[:tokens])


def test_ranks_without_a_process_group_can_be_described_but_not_called() -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 has no process group"):
        Communicator(1, 2).all_reduce(torch.ones(1))


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_beyond_the_size_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not among {size} ranks"):
        Communicator(rank, size)


@pytest.mark.timeout(DEADLINE_S + 20)
def test_aiter_sums_as_torch_does_and_confused_arguments_are_found(ranks: Ranks) -> None:
    """Both releases, in the emulation; what AITER does not take goes to torch."""
    ranks.start(
        """
        from tests.helpers.parallel import reduce_ranks
        print(msgspec.json.encode(reduce_ranks.check(mesh)).decode())
        mesh.close()
        """,
        tp=2,
        timeout=DEADLINE_S,
    )
    swaps = sum(map(len, reduce.SWAPS.values()))
    assert [json.loads(out) for out in ranks.outputs(DEADLINE_S)] == [{"compared": 24, "swaps": swaps}] * 2
