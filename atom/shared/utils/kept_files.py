"""Files about failures, in folders of ATOM_CACHE_DIR: the latest ones are kept."""

from datetime import datetime
from pathlib import Path

from atom.shared.utils import envs

__all__ = ["new_kept_file"]

_MOST_FILES = 20


def new_kept_file(folder: str, name: str, suffix: str) -> Path:
    """The path of a new file that only this user can read; only the latest ones of the folder are kept.

    Raises OSError, or ValueError for no cache.
    """
    directory = Path(envs.ATOM_CACHE_DIR) / folder
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in sorted(directory.glob(f"*{suffix}"))[: 1 - _MOST_FILES]:
        old.unlink(missing_ok=True)
    path = directory / f"{datetime.now():%Y%m%d-%H%M%S-%f}-{name}{suffix}"
    path.touch(mode=0o600)
    return path
