"""Copies in threads: all are confirmed, failed ones by their indices, and errors reach the step loop."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from atom.shared.messages.kv_peers import Lease, ReleaseLease
from atom.shared.messages.kv_tiers import BlockCopy, BlocksCopied, BlocksFound, CopyBlocks, FindBlocks
from workers.memory import tier_copier
from workers.memory.block_rows import BlockRows
from workers.memory.disk_tier import DiskTier
from workers.memory.host_tier import HostTier
from workers.memory.tier_copier import TierCopier

CPU = torch.device("cpu")
DEADLINE_S = 60.0


class Gate:
    """A tier that fails every second block, after `open`."""

    part_bytes = 1 << 20
    is_two_way = False

    def __init__(self) -> None:
        self.open = threading.Event()
        self.calls: list[str] = []

    def write(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
        self.calls.append("write")
        assert self.open.wait(DEADLINE_S)
        return list(range(0, len(copies), 2))

    def read(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
        self.calls.append("read")
        return []


def groups(*tensors: torch.Tensor) -> list[BlockRows]:
    return [BlockRows([tensor], len(tensor), tensor[0].nbytes) for tensor in tensors]


def next_of(copier: TierCopier) -> BlocksCopied | BlocksFound:
    deadline = time.monotonic() + DEADLINE_S
    while (done := copier.next_copied()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return done


def test_blocks_go_to_a_tier_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_copier, "_STAGED_BYTES_CPU", 70)  # two blocks of the first group at a time
    narrow, wide = torch.rand(8, 2, 4), torch.rand(5, 3, 4)
    expected = narrow.clone(), wide.clone()
    copier = TierCopier(groups(narrow, wide), [HostTier([9, 9], [32, 48], CPU, 1 << 20)], rank=3)
    copies = [BlockCopy(index % 2, index // 2, index) for index in range(9)]
    copier.submit(CopyBlocks(1, 0, False, copies))
    assert copier.is_busy and next_of(copier) == BlocksCopied(3, 1) and not copier.is_busy
    narrow.zero_()
    wide.zero_()
    copier.submit(CopyBlocks(2, 0, True, copies))
    assert next_of(copier) == BlocksCopied(3, 2)
    assert torch.equal(narrow[:5], expected[0][:5]) and not narrow[5:].any()
    assert torch.equal(wide[:4], expected[1][:4]) and not wide[4:].any()
    copier.close()
    assert not any(thread.is_alive() for thread in copier._threads)


def test_a_question_is_answered_by_the_tier_in_files(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv" / "model-0", 1)
    copier = TierCopier(groups(torch.rand(8, 2, 4)), [tier], rank=2)
    first, second = bytes(8), bytes([1]) * 8
    copier.submit(CopyBlocks(1, 0, False, [BlockCopy(0, 3, 0, second, b"ids")]))
    assert next_of(copier) == BlocksCopied(2, 1)
    copier.submit(FindBlocks(7, 0, first + second))
    assert next_of(copier) == BlocksFound(2, 7, [b"\0\1"]) and not copier.is_busy
    copier.close()
    tier.close()


def test_loads_come_before_stores_that_wait_and_failures_are_told() -> None:
    tier = Gate()
    copier = TierCopier(groups(torch.rand(8, 2, 4)), [tier], rank=0)
    copies = [BlockCopy(0, index, index) for index in range(4)]
    copier.submit(CopyBlocks(1, 0, False, copies))
    deadline = time.monotonic() + DEADLINE_S
    while not tier.calls:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    copier.submit(CopyBlocks(2, 0, False, copies[:1]))
    copier.submit(CopyBlocks(3, 0, True, copies))
    tier.open.set()
    assert [next_of(copier) for _ in range(3)] == [
        BlocksCopied(0, 1, [0, 2]),
        BlocksCopied(0, 3),
        BlocksCopied(0, 2, [0]),
    ]
    assert tier.calls == ["write", "read", "write"]
    copier.close()


def test_a_short_load_comes_after_the_current_part_of_a_long_one() -> None:
    class Slow(Gate):
        def read(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
            self.calls.append("read")
            assert self.open.wait(DEADLINE_S)
            return []

    tier = Slow()
    copier = TierCopier(groups(torch.rand(8, 2, 4)), [tier], rank=0)
    block = [BlockCopy(0, 0, 0)]
    for part in range(4):
        copier.submit(CopyBlocks(part, 0, True, block, part))
    deadline = time.monotonic() + DEADLINE_S
    while not tier.calls:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    copier.submit(CopyBlocks(8, 0, True, block, 0))
    copier.submit(CopyBlocks(9, 0, True, block, 1))
    tier.open.set()
    numbers = [done.number for done in (next_of(copier) for _ in range(6))]
    assert numbers == [0, 8, 1, 9, 2, 3]
    copier.close()


def test_a_lease_is_released_before_later_loads() -> None:
    class Peer:
        part_bytes = 1 << 20
        is_two_way = False

        def __init__(self) -> None:
            self.open = threading.Event()
            self.calls: list[str] = []

        def read_from(
            self, lease: Lease, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor
        ) -> list[int]:
            self.calls.append(f"read {lease.slot}")
            assert self.open.wait(DEADLINE_S)
            return []

        def release(self, lease: Lease) -> None:
            self.calls.append(f"release {lease.slot}")

        def close(self) -> None:
            pass

    tier = Peer()
    copier = TierCopier(groups(torch.rand(8, 2, 4)), [tier], rank=0)
    leases = [Lease("ipc://kv", slot, 0) for slot in range(3)]
    block = [BlockCopy(0, 0, 0)]
    for number in (0, 1):
        copier.submit(CopyBlocks(number, 0, True, block, lease=leases[number]))
    copier.submit(ReleaseLease(0, leases[1]))
    copier.submit(CopyBlocks(2, 0, True, block, lease=leases[2]))
    tier.open.set()
    assert [next_of(copier).number for _ in range(3)] == [0, 1, 2]
    assert tier.calls == ["read 0", "read 1", "release 1", "read 2"]
    copier.close()


def test_a_load_does_not_wait_for_a_store_where_both_can_run() -> None:
    class TwoWays(Gate):
        is_two_way = True

    tier = TwoWays()
    copier = TierCopier(groups(torch.rand(8, 2, 4)), [tier], rank=0)
    copier.submit(CopyBlocks(1, 0, False, [BlockCopy(0, 0, 0)]))
    copier.submit(CopyBlocks(2, 0, True, [BlockCopy(0, 1, 1)]))
    assert next_of(copier) == BlocksCopied(0, 2)
    tier.open.set()
    assert next_of(copier) == BlocksCopied(0, 1, [0])
    copier.close()


def test_an_error_of_the_thread_ends_the_worker() -> None:
    class Broken(Gate):
        def read(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
            raise RuntimeError("the device is lost")

    copier = TierCopier(groups(torch.rand(8, 2, 4)), [Broken()], rank=0)
    copier.submit(CopyBlocks(1, 0, True, [BlockCopy(0, 0, 0)]))
    with pytest.raises(RuntimeError, match="the device is lost"):
        next_of(copier)
    copier.close()
