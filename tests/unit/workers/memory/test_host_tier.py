"""Slots in host memory keep the rows that were written there."""

import ctypes
import mmap

import pytest
import torch

from atom.shared.messages.kv_tiers import BlockCopy
from workers.memory import host_tier
from workers.memory.host_tier import HostTier

CPU = torch.device("cpu")


def test_rows_come_back() -> None:
    tier = HostTier([3, 2], [8, 16], CPU, room=1 << 20)
    narrow, wide = (torch.randint(0, 255, (2, size), dtype=torch.uint8) for size in (8, 16))
    assert tier.write(0, [BlockCopy(0, 7, 2), BlockCopy(0, 1, 0)], narrow) == []
    assert tier.write(1, [BlockCopy(1, 7, 1), BlockCopy(1, 1, 0)], wide) == []
    found = torch.zeros(2, 8, dtype=torch.uint8)
    assert tier.read(0, [BlockCopy(0, 3, 0), BlockCopy(0, 4, 2)], found) == []
    assert torch.equal(found, narrow.flip(0))
    found = torch.zeros(1, 16, dtype=torch.uint8)
    assert tier.read(1, [BlockCopy(1, 3, 1)], found) == []
    assert torch.equal(found[0], wide[0])


def test_more_than_the_host_has_is_refused() -> None:
    with pytest.raises(
        MemoryError, match=r"--kv-offload-memory: 1\.0 KiB .* 1,?000 bytes are left; lower it"
    ):
        HostTier([64], [16], CPU, room=1000)


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [3, 1, 2, 0], [5, 6, 0, 7], [2]])
def test_neighbouring_slots_are_copied_together(slots: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where each copy takes time to launch."""
    tier = HostTier([8], [16], torch.device("cpu"), 1 << 20)
    monkeypatch.setattr(tier, "_arrays", [])
    copies = [BlockCopy(0, index, slot) for index, slot in enumerate(slots)]
    rows_NS = torch.arange(len(slots) * 16, dtype=torch.uint8).view(-1, 16)
    assert tier.write(0, copies, rows_NS) == []
    found_NS = torch.zeros_like(rows_NS)
    assert tier.read(0, copies, found_NS) == []
    assert torch.equal(found_NS, rows_NS)
    single = tier._slots[0][slots]
    assert torch.equal(single, rows_NS)


def test_pages_are_there_when_they_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that many threads provide them, and not the call that pins them."""
    resident: list[int] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE - 1))()  # whole ones
            first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
            assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), len(pages) * mmap.PAGESIZE, pages) == 0
            resident.append(len(pages) - sum(page & 1 for page in pages))
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(host_tier, "_SHARE_BYTES", 3 << 20)
    HostTier([8], [4 << 20], torch.device("cuda"), 1 << 30)
    assert resident == [0]
