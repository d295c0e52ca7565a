"""The seed of block digests that is kept with blocks on disk: a later start finds them by the same digests.

It is random, so that no client can make two prompts of one digest.
"""

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from atom.shared.utils.own_directory import NotOwnError, is_own_file, make_own_directory

__all__ = ["SEED_FILE", "stored_seed"]

SEED_FILE = "seed"
_DIGITS = 16


def stored_seed(directory: Path) -> int:
    """The seed of a directory, unsigned 64 bit; written there at the first start.

    Raises NotOwnError for a directory or a file that others may use, OSError if it cannot be used.
    """
    make_own_directory(directory)
    path = directory / SEED_FILE
    if not path.exists():
        handle, made = tempfile.mkstemp(dir=directory, prefix=".seed-")
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(_DIGITS // 2))
        with contextlib.suppress(FileExistsError):  # another engine was first
            os.link(made, path)
        os.unlink(made)
    with path.open(encoding="ascii", errors="replace") as file:
        if not is_own_file(os.fstat(file.fileno())):
            raise NotOwnError(f"{path} belongs to another user, or others may use it: remove it")
        text = file.read(_DIGITS + 1)
    try:
        seed = int(text, 16) if len(text) == _DIGITS else None
    except ValueError:
        seed = None
    if seed is None:
        raise NotOwnError(f"{path} is damaged: remove {directory}, the blocks there cannot be found any more")
    return seed
