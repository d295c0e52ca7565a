"""What the library does, and what it raises, in the words of the rest of the code."""

import sys
import threading
import time
from importlib.util import find_spec

import numpy as np
import pytest

from parallel.transfer.nixl_agent import HOST_MEMORY, NixlAgent, TransferError
from tests.helpers.engine.fake_nixl import FakeNixl


class Pair:
    """An agent with memory, and one that reads it."""

    def __init__(self) -> None:
        self.source = np.arange(64, dtype=np.uint8)
        self.target = np.zeros(64, np.uint8)
        self.owner, self.reader = NixlAgent(), NixlAgent()
        for agent, array in ((self.owner, self.source), (self.reader, self.target)):
            agent.register([(array.ctypes.data, array.nbytes)], HOST_MEMORY)
        self.peer = self.reader.connect(self.owner.description())

    def read(self, size: int = 64, seconds: float = 5.0) -> bool:
        """Whether the read was done in time."""
        pair = [
            (np.array([[array.ctypes.data, size, 0]], np.uint64), HOST_MEMORY)
            for array in (self.target, self.source)
        ]
        self.late = self.reader.read(self.peer, pair[0], pair[1], time.monotonic() + seconds)
        return self.late is None


def test_memory_is_read_and_messages_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNixl(monkeypatch)
    pair = Pair()
    assert pair.peer == pair.owner.name != pair.reader.name
    assert pair.read() and np.array_equal(pair.source, pair.target)
    pair.reader.notify(pair.peer, b"done")
    assert pair.owner.poll() == [b"done"] and pair.owner.poll() == []
    pair.reader.disconnect(pair.peer)
    pair.reader.disconnect(pair.peer)
    with pytest.raises(TransferError, match="could not begin a read: NotFoundError"):
        pair.read()


def test_a_late_read_is_the_callers_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNixl(monkeypatch)
    pair = Pair()
    fake.is_stuck = True
    assert not pair.read(seconds=0.01)
    assert pair.late is not None and not pair.late.is_over()
    fake.is_stuck = False
    assert pair.late.is_over() and np.array_equal(pair.source, pair.target)
    fake.is_stuck = True
    assert not pair.read(seconds=0.01)
    fake.is_cut = True
    assert pair.late.is_over()


def test_what_fails_is_said_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNixl(monkeypatch)
    pair = Pair()
    with pytest.raises(TransferError, match="could not begin a read: NotFoundError"):
        pair.read(65)
    with pytest.raises(TransferError, match="could not connect: NotFoundError"):
        pair.reader.connect(b"damaged")
    fake.is_cut = True
    with pytest.raises(TransferError, match="could not read: RemoteDisconnectError"):
        pair.read()
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(TransferError, match="NIXL cannot be opened: ModuleNotFoundError"):
        NixlAgent()


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
def test_the_library_itself() -> None:
    pair = Pair()
    assert pair.peer == pair.owner.name
    owner_is_done = threading.Event()

    def poll() -> None:
        while not owner_is_done.is_set():
            messages.extend(pair.owner.poll())
            time.sleep(0.001)

    messages: list[bytes] = []
    thread = threading.Thread(target=poll)
    thread.start()
    try:
        assert pair.read(seconds=30.0) and np.array_equal(pair.source, pair.target)
        pair.reader.notify(pair.peer, b"done")
        deadline = time.monotonic() + 30.0
        while not messages and time.monotonic() < deadline:
            pair.reader.poll()
        assert messages == [b"done"]
        with pytest.raises(TransferError, match="could not begin a read"):
            pair.read(1 << 20)
        with pytest.raises(TransferError, match="could not connect"):
            pair.reader.connect(b"damaged")
    finally:
        owner_is_done.set()
        thread.join()
    pair.reader.disconnect(pair.peer)
