"""What malloc says of this process."""

import ctypes

import pytest

from workers.memory.heap import heap_use


def test_memory_that_is_freed_is_kept_or_returned() -> None:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("glibc alone counts what malloc has handed out")
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    before = heap_use()
    blocks = [library.malloc(32 << 10) for _ in range(1024)]
    during = heap_use()
    assert during.allocated - before.allocated > 31 << 20
    for block in blocks[:-1]:
        library.free(block)
    after = heap_use()
    assert after.allocated - before.allocated < 1 << 20
    assert after.free - during.free > 30 << 20  # the last block is above them
    library.free(blocks[-1])
