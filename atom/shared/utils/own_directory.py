"""Directories whose files only this user may read and write."""

import os
import stat
from pathlib import Path

__all__ = ["NotOwnError", "is_own_file", "make_own_directory"]

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class NotOwnError(ValueError):
    """A path is not a directory, or others may use it; the text is one line that says what to do."""


def make_own_directory(path: Path) -> None:
    """Create a directory, and its parents, unless it exists. Raises NotOwnError or OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotOwnError(f"{path} is no directory, or a symbolic link: name the directory itself")
    if found.st_uid != os.geteuid():
        raise NotOwnError(f"{path} belongs to user {found.st_uid}: choose a directory of user {os.geteuid()}")
    if found.st_mode & _OTHERS:
        raise NotOwnError(
            f"others may use {path} (mode {stat.S_IMODE(found.st_mode):o}): run chmod 700 on it"
        )


def is_own_file(found: os.stat_result) -> bool:
    """Whether it is a regular file of this user, which no others may read or write."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS
