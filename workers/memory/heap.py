"""What malloc has allocated in this process, and what it keeps."""

import ctypes
from functools import cache
from typing import Any

from atom.shared.messages.engine import HeapUse

__all__ = ["heap_use"]


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of <malloc.h>."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",  # bytes of regions of their own, of large allocations
            "usmblks",
            "fsmblks",
            "uordblks",  # bytes allocated of the arenas
            "fordblks",  # bytes free in the arenas
            "keepcost",
        )
    ]


def heap_use() -> HeapUse:
    """Over all threads; zeros with C libraries other than glibc 2.33 and later."""
    mallinfo2 = _mallinfo2()
    if mallinfo2 is None:
        return HeapUse()
    info = mallinfo2()
    return HeapUse(info.uordblks + info.hblkhd, info.fordblks)


@cache
def _mallinfo2() -> Any:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _Mallinfo2
    return found
