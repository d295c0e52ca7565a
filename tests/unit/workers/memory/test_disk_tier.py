"""Blocks in files: found by later starts, shared, bounded, and never trusted."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atom.shared.messages.kv_tiers import BlockCopy
from atom.shared.utils.own_directory import NotOwnError
from workers.memory import disk_tier, file_worker
from workers.memory.disk_tier import DiskTier

A, B, C = (bytes([number]) * 8 for number in (1, 2, 3))
ROWS = torch.arange(48, dtype=torch.uint8).view(3, 16)


def copies(*digests: bytes, replaced: bytes = b"") -> list[BlockCopy]:
    return [BlockCopy(0, 5, 0, digest, b"input" + digest, replaced) for digest in digests]


def read(tier: DiskTier, *digests: bytes) -> tuple[list[int], torch.Tensor]:
    rows = torch.zeros(len(digests), 16, dtype=torch.uint8)
    return tier.read(0, copies(*digests), rows), rows


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Tiers of one directory, which are closed after the test."""
    opened: list[DiskTier] = []

    def make(num_files: int = 1, **options: Any) -> DiskTier:
        opened.append(DiskTier(tmp_path / "kv" / "model-0", 2, num_files, **options))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()


@pytest.fixture
def tier(open_tier: Callable[..., DiskTier]) -> DiskTier:
    made = open_tier(3)
    assert made.write(0, copies(A, B, C), ROWS) == []
    return made


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kv" / "model-0").iterdir())


def test_later_starts_find_blocks_in_the_order_of_their_use(
    tmp_path: Path, tier: DiskTier, open_tier: Callable[..., DiskTier]
) -> None:
    for age, path in enumerate(files(tmp_path)):
        os.utime(path, (age, age))
    failed, rows = read(tier, A)
    assert failed == [] and torch.equal(rows[0], ROWS[0])
    later = open_tier()
    assert later.stored([3, 2]) == [B + C + A, b""]
    failed, rows = read(later, C, A)
    assert failed == [] and torch.equal(rows, ROWS[[2, 0]])


def test_a_start_with_fewer_slots_removes_the_least_recently_used(tmp_path: Path, tier: DiskTier) -> None:
    for age, path in enumerate(files(tmp_path)):
        os.utime(path, (age, age))
    assert tier.stored([1]) == [C]
    assert len(files(tmp_path)) == 1


def test_replaced_blocks_are_removed(tmp_path: Path, tier: DiskTier) -> None:
    assert tier.write(0, copies(bytes(8), replaced=A), ROWS[:1]) == []
    assert read(tier, A)[0] == [0] and read(tier, B, C)[0] == []


def test_damaged_and_missing_blocks_are_misses(
    tmp_path: Path, tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, _ = files(tmp_path)
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    with caplog.at_level(logging.WARNING):
        failed, rows = read(tier, A, B, C)
    assert failed == [0, 1] and torch.equal(rows[2], ROWS[2])
    assert not first.exists()
    assert len(caplog.records) == 1 and "is damaged, and is computed again" in caplog.text


def test_a_block_that_another_engine_has_stored_is_not_written_again(
    tmp_path: Path, tier: DiskTier, open_tier: Callable[..., DiskTier]
) -> None:
    before = [path.stat().st_ino for path in files(tmp_path)]
    other = open_tier()
    assert other.write(0, copies(A), ROWS[:1]) == []
    assert [path.stat().st_ino for path in files(tmp_path)] == before


def test_without_locks_old_partial_files_are_removed(
    tmp_path: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unsupported)
    directory = tmp_path / "kv" / "model-0"
    old, new = directory / ".partial-1-0", directory / ".partial-2-0"
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    assert tier.write(0, copies(bytes(8)), ROWS[:1]) == []
    tier.stored([4, 2])
    assert not old.exists() and new.exists() and len(files(tmp_path)) == 5


def test_directories_that_others_may_use_are_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o777)
    with pytest.raises(NotOwnError, match="chmod 700"):
        DiskTier(tmp_path / "kv" / "model-0", 2)


def test_blocks_of_others_are_present_once_they_are_stored(
    tier: DiskTier, open_tier: Callable[..., DiskTier]
) -> None:
    other = open_tier()
    new = bytes([9]) * 8
    assert tier.present(A + new + B) == [b"\1\0\1", b"\0\0\0"]
    assert other.write(1, copies(new), ROWS[:1]) == []
    assert tier.present(A + new + B) == [b"\1\0\1", b"\0\1\0"]


def test_more_blocks_than_the_shared_memory_holds(
    open_tier: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_PART_BYTES", 40)  # two rows
    tier = open_tier()
    digests = [bytes([number]) * 8 for number in range(5)]
    rows = torch.arange(80, dtype=torch.uint8).view(5, 16)
    assert tier.write(0, copies(*digests), rows) == []
    failed, found = read(tier, *digests[:3], bytes([9]) * 8, digests[4])
    assert failed == [3] and torch.equal(found[[0, 1, 2, 4]], rows[[0, 1, 2, 4]])


def test_a_block_larger_than_a_part(
    open_tier: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_PART_BYTES", 8)
    tier = open_tier(most_bytes=16)
    assert tier.write(0, copies(A, B), ROWS[:2]) == []
    failed, found = read(tier, B, A)
    assert failed == [] and torch.equal(found, ROWS[[1, 0]])


def test_the_end_of_a_process_costs_blocks_only(
    tier: DiskTier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = tier._reader.pid, tier._writer.pid
    assert reader is not None and writer is not None
    for pid in (reader, writer):
        os.kill(pid, signal.SIGKILL)
    with caplog.at_level(logging.WARNING):
        assert read(tier, A, B)[0] == [0, 1]
        assert tier.write(0, copies(bytes(8)), ROWS[:1]) == [0]
    assert "the process for files of KV blocks has ended" in caplog.text
    assert tier.present(A) == [b"\0", b"\0"]  # for a while it is not started again
    monkeypatch.setattr(file_worker, "_PAUSE_S", 0.0)
    tier._reader._paused_until = tier._writer._paused_until = 0.0
    failed, rows = read(tier, A, B)
    assert failed == [] and torch.equal(rows, ROWS[:2]) and tier._reader.pid not in (None, reader)
    assert tier.write(0, copies(bytes(8)), ROWS[:1]) == []
