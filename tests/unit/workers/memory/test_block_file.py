"""Files of blocks: what was written is read, anything else is noticed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from workers.memory.block_file import HEADER_BYTES, DamagedBlockError, read_block, write_block

INPUT = b"digest and ids"
ROW = np.arange(200, dtype=np.uint8)


def read(path: Path, hash_input: bytes = INPUT, size: int = 200) -> bytes:
    row = np.empty(size, np.uint8)
    read_block(path, hash_input, row)
    return row.tobytes()


WRITER = """
import itertools, sys
from pathlib import Path
import numpy as np
from workers.memory.block_file import write_block
for number in itertools.count():
    row = np.arange(1 << 18, dtype=np.uint64).view(np.uint8)
    write_block(Path(sys.argv[1], f"block{number}"), Path(sys.argv[1], "partial"), b"ids", row)
"""
DEADLINE_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "block"
    write_block(path, tmp_path / "partial", INPUT, ROW)
    return path


def test_a_block_comes_back(path: Path) -> None:
    assert read(path) == ROW.tobytes()
    assert path.stat().st_size == HEADER_BYTES + len(INPUT) + 200
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_every_changed_byte_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 0x20
        path.write_bytes(changed)
        with pytest.raises(DamagedBlockError):
            read(path)


def test_every_shorter_and_longer_file_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(DamagedBlockError, match=f"it has {size} bytes"):
            read(path)
    path.write_bytes(content + b"x")
    with pytest.raises(DamagedBlockError, match="it has"):
        read(path)


def test_blocks_of_other_tokens_and_layouts_are_noticed(path: Path) -> None:
    with pytest.raises(DamagedBlockError, match="other tokens"):
        read(path, INPUT[::-1])
    with pytest.raises(DamagedBlockError, match="bytes"):
        read(path, size=199)


def test_files_of_others_are_not_read(path: Path) -> None:
    path.chmod(0o640)
    with pytest.raises(DamagedBlockError, match="others may use it"):
        read(path)
    path.chmod(0o600)
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        read(link)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    calls: list[int] = []

    def full(handle: int, content: memoryview) -> int:
        calls.append(len(content))
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return write(handle, content[:50])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_block(tmp_path / "block", tmp_path / "partial", INPUT, ROW)
    assert list(tmp_path.iterdir()) == []


def test_another_file_of_the_temporary_name_is_kept(tmp_path: Path) -> None:
    (tmp_path / "partial").write_text("of another process")
    with pytest.raises(FileExistsError):
        write_block(tmp_path / "block", tmp_path / "partial", INPUT, ROW)
    assert (tmp_path / "partial").read_text() == "of another process"


def test_a_killed_writer_leaves_whole_files_and_a_partial_one(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) as writer:
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "block5").exists():
            assert time.monotonic() < deadline and writer.poll() is None
            time.sleep(0.001)
        writer.kill()
    whole = sorted(tmp_path.glob("block*"))
    assert len(whole) > 5
    expected = np.arange(1 << 18, dtype=np.uint64).tobytes()
    for path in whole:
        assert read(path, b"ids", len(expected)) == expected
    assert {path.name for path in tmp_path.iterdir()} - {path.name for path in whole} <= {"partial"}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_damaged(tmp_path: Path, make: Callable[[Path], None]) -> None:
    other = tmp_path / "other"
    make(other)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(DamagedBlockError):
        read(other)
    assert len(os.listdir("/proc/self/fd")) == len(before)
