"""The seed of digests stays with a directory."""

from pathlib import Path

import pytest

from atom.shared.utils.own_directory import NotOwnError
from engine_core.kv_tiers.tier_seed import stored_seed


def test_later_starts_have_the_same_seed(tmp_path: Path) -> None:
    seed = stored_seed(tmp_path / "a")
    assert 0 <= seed < 1 << 64 and stored_seed(tmp_path / "a") == seed != stored_seed(tmp_path / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["seed"]
    assert (tmp_path / "a" / "seed").stat().st_mode & 0o777 == 0o600


def test_directories_that_others_may_use_are_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(NotOwnError, match="chmod 700"):
        stored_seed(tmp_path / "open")
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(NotOwnError, match="symbolic link"):
        stored_seed(tmp_path / "link")


def test_seeds_that_others_may_write_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    stored_seed(tmp_path / "a")
    seed = tmp_path / "a" / "seed"
    seed.chmod(0o644)
    with pytest.raises(NotOwnError, match="others may use it"):
        stored_seed(tmp_path / "a")
    seed.chmod(0o600)
    seed.write_text("not a number ..")
    with pytest.raises(NotOwnError, match="damaged"):
        stored_seed(tmp_path / "a")
