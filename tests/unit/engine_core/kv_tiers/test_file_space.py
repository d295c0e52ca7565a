"""What files take on a file system is measured at a short one."""

import os
from pathlib import Path

import pytest

from engine_core.kv_tiers.file_space import LEAST_UNIT, space_unit


def test_the_unit_is_what_a_short_file_takes(tmp_path: Path) -> None:
    file = tmp_path / "short"
    file.write_bytes(b"0123456789abcdef")
    assert space_unit(file) == max(LEAST_UNIT, file.stat().st_blocks * 512)


@pytest.mark.parametrize(("blocks", "unit"), [(128, 1 << 16), (0, LEAST_UNIT), (1, LEAST_UNIT)])
def test_large_units_and_files_within_their_inodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, unit: int
) -> None:
    found = os.stat(tmp_path)
    monkeypatch.setattr(Path, "stat", lambda path: os.stat_result(found, {"st_blocks": blocks}))
    assert space_unit(tmp_path / "short") == unit
