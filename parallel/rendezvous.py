"""How the ranks of a mesh meet: a TCPStore that rank 0 hosts on a socket bound before it started.

No port is probed or chosen twice: the parent binds the socket, tells its number to every rank and
passes the socket to rank 0. All keys begin with the engine's restart generation (`Rendezvous.life`), so a
worker left over from an earlier one meets no other, whatever port it finds.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist

from atom.shared.messages.launch import Rendezvous

_POLL_S = 0.05
# How long rank 0 keeps the store for the others when a mesh closes.
_GOODBYE_S = 5.0


class MeetingPoint:
    """The store of one restart generation, once every rank has arrived."""

    def __init__(self, where: Rendezvous, rank: int, size: int, timeout: float):
        """Returns when all ranks have arrived; raises RuntimeError that names the missing ones.

        `timeout` in seconds.
        """
        if (rank == 0) != (where.listen_fd is not None):
            raise ValueError("rank 0, and no other rank, hosts the store on the inherited listen_fd")
        self._where = where
        self._rank = rank
        self._size = size
        _bind_to(where.interface)
        deadline = time.monotonic() + timeout
        self.store = dist.PrefixStore(f"life {where.life}", self._connect(timeout))
        try:
            self.store.set(f"arrived {rank}", "")
            missing = self._wait_for("arrived", deadline)
        except RuntimeError:
            raise RuntimeError(f"{self._me} lost rank 0, which hosts the store: has it ended?") from None
        if missing:
            ranks = ", ".join(map(str, missing))
            raise RuntimeError(f"{self._me} waited {timeout:.0f} s for rank {ranks}")

    def close(self) -> None:
        """Leave; rank 0 stays until the others have left, or for a few seconds."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"left {self._rank}", "")
            if self._rank == 0:
                self._wait_for("left", time.monotonic() + _GOODBYE_S)

    def _connect(self, timeout: float) -> dist.Store:
        where = self._where

        def connect() -> dist.Store:
            return dist.TCPStore(
                where.address,
                where.port,
                is_master=self._rank == 0,
                timeout=timedelta(seconds=timeout),
                # Would count connections of any generation; the ranks of this one are awaited below.
                wait_for_workers=False,
                master_listen_fd=where.listen_fd,
            )

        try:
            return _within(timeout, connect)
        except (TimeoutError, RuntimeError) as error:
            reason = str(error).partition("\n")[0] or "no response"
            raise RuntimeError(f"{self._me} cannot reach rank 0 within {timeout:.0f} s: {reason}") from None

    def _wait_for(self, key: str, deadline: float) -> list[int]:
        """The ranks that have not set their key at the deadline."""
        # Polled: `Store.wait` prints a stack trace when it times out.
        missing = list(range(self._size))
        while missing := [rank for rank in missing if not self.store.check([f"{key} {rank}"])]:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        return missing

    @property
    def _me(self) -> str:
        where = self._where
        return f"rank {self._rank} of {self._size}, life {where.life}, at {where.address}:{where.port},"


def _bind_to(interface: str) -> None:
    """Bind gloo and NCCL to the interface, unless the user's environment names another."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _within(timeout: float, make: Callable[[], dist.Store]) -> dist.Store:
    """`make()`, or TimeoutError: a TCPStore waits for the host's first response without a deadline."""
    future: Future[dist.Store] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    return future.result(timeout)
