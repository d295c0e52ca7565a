"""The space that files take on a file system, which gives it in units: a short file takes a whole one."""

from pathlib import Path

__all__ = ["LEAST_UNIT", "space_unit"]

_STAT_BLOCK = 512
"""Bytes that `st_blocks` counts in, whatever the file system."""
LEAST_UNIT = 4096
"""That of nearly all file systems. Some keep a short file within its inode, and count less for it."""


def space_unit(short_file: Path) -> int:
    """Bytes of a unit, as measured: what a file of a few bytes takes. Raises OSError."""
    return max(LEAST_UNIT, short_file.stat().st_blocks * _STAT_BLOCK)
