"""A Redis or Valkey server in a process of its own, which tests stop, kill and start again."""

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.helpers.servers.ports import kept_port

__all__ = ["PROGRAM", "RedisProcess", "redis_process"]

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
"""None if neither is installed."""
_DEADLINE_S = 60.0


class RedisProcess:
    """Keeps nothing on disk."""

    def __init__(self, password: str):
        self._kept = contextlib.ExitStack()
        self.port = self._kept.enter_context(kept_port())
        self._password = password
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it takes connections."""
        assert PROGRAM is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--loglevel", "warning"]
        memory = ["--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"]
        command = [PROGRAM, *options, *memory, "--requirepass", self._password]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", self.port)):
                    return
            assert time.monotonic() < deadline, "the store does not start"
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Also one that is stopped."""
        self.process.kill()
        self.process.wait(_DEADLINE_S)

    def close(self) -> None:
        self.kill()
        self._kept.close()


@contextmanager
def redis_process(password: str) -> Iterator[RedisProcess]:
    """Gone when the block ends."""
    made = RedisProcess(password)
    try:
        yield made
    finally:
        made.close()
