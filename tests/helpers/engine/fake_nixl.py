"""NIXL's published interface (`nixl._api`) in one process: reads are copies, with faults on demand."""

import ctypes
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

__all__ = ["FakeNixl"]

_MAGIC = b"fake-nixl:"


class RemoteDisconnectError(Exception):
    """As the library raises for an agent that has ended."""


class NotFoundError(Exception):
    """As the library raises for memory, or an agent, that it does not know."""


class FakeNixl:
    """All agents of a test, and what goes wrong with their reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.agents: dict[str, Any] = {}
        self.num_reads = 0
        """Reads that have begun."""
        self.bytes_read = 0
        self.is_stuck = False
        """Whether reads do not end."""
        self.stuck: set[str] = set()
        """Agents of which reads do not end."""
        self.is_cut = False
        """Whether reads fail."""
        self.after_read: list[Any] = []
        """Each is called once, after the next read is done."""
        fake = self

        class Agent(_Agent):
            def __init__(self, name: str, settings: Any):
                super().__init__(fake, name)

        api = ModuleType("nixl._api")
        api.nixl_agent = Agent  # type: ignore[attr-defined]
        api.nixl_agent_config = dict  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
        monkeypatch.setitem(sys.modules, "nixl._api", api)


class _Read:
    def __init__(self, peer: str, targets: NDArray[np.uint64], sources: NDArray[np.uint64]):
        self.peer = peer
        self.targets = targets
        self.sources = sources
        self.is_released = False


class _Agent:
    def __init__(self, fake: FakeNixl, name: str):
        self.name = name
        self._fake = fake
        self._regions: list[tuple[int, int]] = []
        self._known: set[str] = set()
        self._messages: dict[str, list[bytes]] = {}
        fake.agents[name] = self

    def register_memory(self, places: list[tuple[int, int, int, str]], memory: str) -> None:
        assert memory in ("DRAM", "VRAM")
        self._regions += [(address, size) for address, size, _, _ in places]

    def get_agent_metadata(self) -> bytes:
        return _MAGIC + self.name.encode()

    def add_remote_agent(self, description: bytes) -> bytes:
        if not description.startswith(_MAGIC):
            raise NotFoundError("NIXL_ERR_NOT_FOUND")
        name = description.removeprefix(_MAGIC)
        self._known.add(name.decode())
        return name

    def remove_remote_agent(self, name: str) -> None:
        self._known.remove(name)

    def get_xfer_descs(self, places: NDArray[np.uint64], memory: str) -> NDArray[np.uint64]:
        assert memory in ("DRAM", "VRAM") and places.ndim == 2 and places.shape[1] == 3
        return places.copy()

    def initialize_xfer(
        self, operation: str, targets: NDArray[np.uint64], sources: NDArray[np.uint64], peer: str
    ) -> _Read:
        assert operation == "READ" and np.array_equal(targets[:, 1], sources[:, 1])
        if peer not in self._known:
            raise NotFoundError("NIXL_ERR_NOT_FOUND")
        self._check(targets)
        self._fake.agents[peer]._check(sources)
        return _Read(peer, targets, sources)

    def transfer(self, read: _Read) -> str:
        self._fake.num_reads += 1
        return self.check_xfer_state(read)

    def check_xfer_state(self, read: _Read) -> str:
        if self._fake.is_cut or read.peer not in self._fake.agents:
            raise RemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        if self._fake.is_stuck or read.peer in self._fake.stuck:
            return "PROC"
        for (target, size, _), (source, _, _) in zip(
            read.targets.tolist(), read.sources.tolist(), strict=True
        ):
            ctypes.memmove(target, source, size)
            self._fake.bytes_read += size
        for call in self._fake.after_read[:1]:
            del self._fake.after_read[0]
            call()
        return "DONE"

    def release_xfer_handle(self, read: _Read) -> None:
        assert not read.is_released
        read.is_released = True

    def send_notif(self, peer: str, message: bytes) -> None:
        if peer not in self._fake.agents:
            raise RemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        self._fake.agents[peer]._messages.setdefault(self.name, []).append(message)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found = self._messages
        self._messages = {}
        return found

    def _check(self, places: NDArray[np.uint64]) -> None:
        for address, size, _ in places.tolist():
            if not any(
                start <= address and address + size <= start + length for start, length in self._regions
            ):
                raise NotFoundError("NIXL_ERR_NOT_FOUND")
