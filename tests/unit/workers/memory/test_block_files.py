"""Files of blocks without a process: a full disk, and files that are being written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workers.memory import block_file, block_files
from workers.memory.block_files import BlockFile, BlockFiles
from workers.memory.disk_tier import DiskTier

ROWS = np.arange(48, dtype=np.uint8).reshape(3, 16)
NAMES = [f"0-{number:016x}" for number in range(3)]
FILES = [BlockFile(name, b"input" + name.encode()) for name in NAMES]


@pytest.fixture(params=[1, 2])
def files(tmp_path: Path, request: pytest.FixtureRequest) -> BlockFiles:
    directory = tmp_path / "kv" / "model-0"
    directory.mkdir(mode=0o700, parents=True)
    tmp_path.joinpath("kv").chmod(0o700)
    made = BlockFiles(directory, request.param)
    assert made.write(FILES, ROWS) == [""] * 3
    return made


def test_blocks_come_back(files: BlockFiles) -> None:
    found = np.zeros_like(ROWS)
    assert files.read(FILES[::-1], found) == [""] * 3
    assert (found == ROWS[::-1]).all()
    other = BlockFile(NAMES[0], b"other ids")
    assert "it has" in files.read([other], found[:1])[0]
    assert files.present([*NAMES, "0-none"]) == b"\0\1\1\0"  # the damaged one is removed


def test_a_full_disk_costs_blocks_only(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_files, "write_block", full)
    for _ in range(3):
        new, stored = files.write([BlockFile("0-new", b"new"), FILES[0]], ROWS[:2])
        assert "No space left on device" in new and stored == ""


def test_blocks_come_back_where_nothing_may_be_written(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.utime", refused)
    rows = np.zeros_like(ROWS)
    assert files.read(FILES, rows) == [""] * len(FILES) and (rows == ROWS).all()


def test_partial_files_of_ended_processes_are_removed(
    tmp_path: Path, files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However young they are. One that is being written stays."""
    directory = tmp_path / "kv" / "model-0"
    (directory / "not a block").touch()

    def start(*given: Any) -> None:
        (directory / ".partial-1-0").touch()
        write_all(*given)
        other.stored([3, 2])

    write_all = block_file._write_all
    monkeypatch.setattr(block_file, "_write_all", start)
    other = DiskTier(directory, 2)
    assert files.write([BlockFile(f"1-{0:016x}", b"new")], ROWS[:1]) == [""]
    names = {path.name for path in directory.iterdir()}
    assert len(names) == 5 and "not a block" in names and ".partial-1-0" not in names
    other.close()
