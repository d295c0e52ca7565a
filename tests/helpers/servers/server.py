"""A real server on a free port, started and ended as users do."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

START_DEADLINE_S = 180.0
STOP_DEADLINE_S = 60.0
_REPLACED_DEADLINE_S = 90.0
_LAST_LINES_S = 2.0
"""For those of an ended process; the server that has replaced it may hold the pipe."""
_PROGRAM = ("-m", "atom.entrypoints.openai_server")
_START_TIME = 17
"""Its place in /proc/PID/stat after the parent, in ticks."""


class ServerProcess:
    """A server's launcher and its log; ended for certain by `kill`."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str] | None = None):
        """`variables`: of the environment, besides those of this process."""
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **(variables or {})},
        )
        self.log: list[str] = []
        self.url = ""
        self._may_read = threading.Event()
        self._may_read.set()
        self._holds_line = threading.Event()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def until(self, pattern: str, deadline_s: float = START_DEADLINE_S) -> float:
        """Seconds until the log has a line that matches: what it tells of may be seen before it is read."""
        begun = time.monotonic()
        while True:
            ended = self.process.poll() is not None
            text = self.text()
            if re.search(pattern, text, re.MULTILINE):
                return time.monotonic() - begun
            assert not ended, f"the server ended without {pattern!r}:\n{text}"
            assert time.monotonic() - begun < deadline_s, f"no {pattern!r} in time:\n{text}"
            time.sleep(0.02)

    def text(self) -> str:
        """The log that has been read; all of it once the server has ended."""
        if self.process.poll() is not None:
            self._reader.join(_LAST_LINES_S)
        return "".join(self.log)

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(STOP_DEADLINE_S)

    def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()
        self._reader.join(STOP_DEADLINE_S)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def children(self) -> dict[int, str]:
        """Process ids and command lines of its child processes, in the order of their starts."""
        return child_processes(self.process.pid)

    @contextlib.contextmanager
    def unread_log(self) -> Iterator[None]:
        """The pipe of the log is full in the block, and is not read."""
        assert self.process.stderr is not None
        self._holds_line.clear()
        self._may_read.clear()
        filler = os.open(f"/proc/self/fd/{self.process.stderr.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(filler, b"\n")
            assert self._holds_line.wait(STOP_DEADLINE_S)  # from now on the thread reads no more
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(filler, b"\n")
            yield
        finally:
            os.close(filler)
            self._may_read.set()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if not self._may_read.is_set():
                self._holds_line.set()
                self._may_read.wait()
            if found := re.search(r"ready .*(https?://\S+)", line):
                self.url = found[1]
            self.log.append(line)


class Server(ServerProcess):
    """`python -m atom.entrypoints.openai_server` on a free port."""

    def __init__(self, *args: str, program: Sequence[str] = _PROGRAM):
        """`program`: what Python runs."""
        super().__init__([sys.executable, *program, "--host", "127.0.0.1", "--server-port", "0", *args])

    def wait_ready(self) -> None:
        self.until("ready .*http")


@contextlib.contextmanager
def running_server(*args: str, program: Sequence[str] = _PROGRAM) -> Iterator[Server]:
    """A ready server, gone when the block ends. Its log is printed when the test fails."""
    server = Server(*args, program=program)
    try:
        server.wait_ready()
        yield server
    except BaseException:
        print(server.text())
        raise
    finally:
        server.kill()


async def replaced(old: Server, *args: str) -> Server:
    """A new server in place of `old`, which has ended well."""
    new = Server(*args, "--upgrade-from", str(old.process.pid))
    try:
        await asyncio.to_thread(new.wait_ready)
        assert await asyncio.to_thread(old.process.wait, _REPLACED_DEADLINE_S) == 0, old.text()
    except BaseException:
        new.kill()
        raise
    return new


def child_processes(parent: int) -> dict[int, str]:
    """Living children of `parent`: pid and command line.

    In the order of their starts. Process ids are not always: they begin again at the largest.
    """
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if not entry.isdigit():
                continue
            with open(f"/proc/{entry}/stat") as file:
                state, ppid, *others = file.read().rpartition(")")[2].split()
            if int(ppid) == parent and state != "Z":
                with open(f"/proc/{entry}/cmdline") as file:
                    line = file.read().replace("\0", " ").strip()
                found.append((int(others[_START_TIME]), int(entry), line))
    return {pid: line for _, pid, line in sorted(found)}


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
