"""Files that other users of the host can have written."""

import os
from pathlib import Path

import pytest

from atom.shared.utils.trusted_path import distrusted


def test_a_directory_of_ours_is_trusted_and_what_is_not_there_yet(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(mode=0o644)
    assert distrusted(file) == distrusted(tmp_path / "later" / "file") == ""


@pytest.mark.parametrize("which", ["file", "its directory", "the directory above"])
def test_what_every_user_can_write_is_not_trusted(tmp_path: Path, which: str) -> None:
    directory = tmp_path / "above" / "directory"
    directory.mkdir(parents=True)
    file = directory / "file"
    file.touch()
    changed = {"file": file, "its directory": directory, "the directory above": directory.parent}[which]
    changed.chmod(0o777)
    assert distrusted(file) == f"{changed} can be written by every user"


def test_a_sticky_directory_keeps_our_files(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "shared" / "ours").mkdir(mode=0o700)
    assert distrusted(tmp_path / "shared" / "ours") == ""


def test_a_link_is_as_good_as_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    assert "every user" in distrusted(tmp_path / "link" / "file")


def test_other_users_and_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another user, whose files all of these are not."""
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o664)
    target, real = file.resolve(), Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        found = real(path, **options)
        values = list(found)
        values[4:6] = (5000, group) if path == target else (0, 0)
        return os.stat_result(values)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(os, "geteuid", lambda: 5000)
    group = 5000
    assert distrusted(file) == ""
    group = 100
    assert distrusted(file) == f"{target} can be written by group 100"
    monkeypatch.setattr(os, "geteuid", lambda: 6000)
    assert distrusted(file) == f"{target} belongs to user 5000"
