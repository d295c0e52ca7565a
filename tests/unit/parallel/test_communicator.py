"""Collectives between real processes, and alone."""

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parallel.communicator import Communicator
from parallel.state import TPGroup, init_tensor_parallel

CPU = torch.device("cpu")
DEADLINE = 60.0
PREAMBLE = """
    import sys, torch
    from parallel.communicator import Communicator
    from parallel.state import init_tensor_parallel
    rank, size, path, timeout = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    torch.set_num_threads(1)
    group = init_tensor_parallel(rank, size, path, torch.device("cpu"), timeout)
    comm = Communicator(group)
"""


class Ranks:
    """Processes that run one script, rank by rank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._children: list[subprocess.Popen[str]] = []

    def start(self, body: str, size: int, timeout: float = DEADLINE) -> None:
        script = textwrap.dedent(PREAMBLE) + textwrap.dedent(body)
        for rank in range(size):
            arguments = [str(rank), str(size), str(self._path), str(timeout)]
            child = subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            self._children.append(child)

    def finish(self) -> list[tuple[int, str, str]]:
        """(exit status, standard output, standard error) of each."""
        ends = []
        for child in self._children:
            out, err = child.communicate(timeout=DEADLINE)
            ends.append((child.returncode, out, err))
        return ends

    def kill(self) -> None:
        for child in self._children:
            child.kill()
            child.communicate(timeout=DEADLINE)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path / "meet")
    yield started
    started.kill()


@pytest.mark.timeout(120)
def test_collectives_of_two_processes(ranks: Ranks) -> None:
    ranks.start(
        """
        x = torch.arange(6.0).view(2, 3) * (rank + 1)
        assert comm.all_reduce(x) is x
        assert x.tolist() == [[0, 3, 6], [9, 12, 15]]

        sizes = [3, 2]
        mine = torch.arange(2 * sizes[rank]).view(2, -1) + 100 * rank
        whole = comm.all_gather_last_dim(mine, sizes)
        assert whole.tolist() == [[0, 1, 2, 100, 101], [3, 4, 5, 102, 103]], whole

        half = torch.full((4,), 0.5 + rank, dtype=torch.bfloat16)
        assert comm.all_reduce(half).tolist() == [2.0] * 4
        group.close()
        print("done", comm.rank, comm.size)
        """,
        size=2,
    )
    for rank, (status, out, err) in enumerate(ranks.finish()):
        assert (status, out) == (0, f"done {rank} 2\n"), err


@pytest.mark.timeout(120)
def test_sums_have_the_same_bits_on_every_rank(ranks: Ranks) -> None:
    ranks.start(
        """
        import hashlib
        x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
        print(hashlib.sha256(comm.all_reduce(x).numpy().tobytes()).hexdigest())
        group.close()
        """,
        size=3,
    )
    ends = ranks.finish()
    assert [status for status, _, _ in ends] == [0] * 3, ends
    assert len({out for _, out, _ in ends}) == 1


@pytest.mark.timeout(120)
def test_a_rank_that_died_is_noticed(ranks: Ranks) -> None:
    ranks.start(
        """
        comm.all_reduce(torch.ones(1))
        if rank == 1:
            import os; os._exit(3)
        comm.all_reduce(torch.ones(1))
        """,
        size=2,
        timeout=5.0,
    )
    started = time.monotonic()
    (status, _, err), (other, _, _) = ranks.finish()
    assert time.monotonic() - started < 45
    assert (status, other) == (1, 3), err
    assert "RuntimeError" in err or "DistBackendError" in err


@pytest.mark.timeout(120)
def test_a_rank_that_never_comes_is_noticed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PREAMBLE), "0", "2", str(tmp_path / "m"), "2"],
        stderr=subprocess.PIPE, text=True,
    ) as lonely:  # fmt: skip
        try:
            _, err = lonely.communicate(timeout=DEADLINE)
        finally:
            lonely.kill()
    assert lonely.returncode == 1
    assert "Error" in err


def test_one_rank_needs_no_one(tmp_path: Path) -> None:
    path = tmp_path / "unused"
    group = init_tensor_parallel(0, 1, path, CPU)
    assert group == TPGroup(0, 1, CPU)
    assert not path.exists()
    comm, x = Communicator(group), torch.ones(2, 3)
    assert comm.all_reduce(x) is x
    assert comm.all_gather_last_dim(x, [3]) is x
    group.close()


def test_a_rank_beyond_the_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank 2 is not among 2 ranks"):
        init_tensor_parallel(2, 2, tmp_path / "unused", CPU)
