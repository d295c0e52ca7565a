"""Whether other users of the host can have written a file: asked before code or data of a cache is used."""

import os
import stat
from pathlib import Path

__all__ = ["REMEDY", "distrusted"]

REMEDY = "remove the others' right to write it (chmod go-w), or set ATOM_CACHE_DIR to a directory of your own"

_ROOT = 0


def distrusted(path: Path) -> str:
    """Why another user can have written what is at `path`, in one line; empty if only this user and root can.

    Each directory on the way is looked at, because whoever may rename in it can replace what is below. A
    sticky directory, as /tmp, lets nobody replace another user's files. Write permission of a group is fine
    if the group has this user's own number (a private group, or a volume's in Kubernetes) or is root's.
    What does not exist yet is trusted.
    """
    found = path.resolve()
    for each in (found, *found.parents):
        try:
            status = each.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{each} cannot be examined: {error.strerror}"
        if problem := _problem(status):
            return f"{each} {problem}"
    return ""


def _problem(status: os.stat_result) -> str:
    user = os.geteuid()
    if status.st_uid not in (user, _ROOT):
        return f"belongs to user {status.st_uid}"
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in (user, _ROOT):
        return f"can be written by group {status.st_gid}"
    return ""
