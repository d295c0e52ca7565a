"""Several nodes as processes of this host: on loopback addresses, or in network namespaces."""

import contextlib
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from tests.helpers.servers.random_server import MODEL_NAME
from tests.helpers.servers.server import STOP_DEADLINE_S, child_processes

JOIN_DEADLINE_S = 180.0
SECRET = "of these tests alone: 0123456789"
MASTER_PORT = 29500
ARGS = (
    *("--dtype", "float32", "--device", "cpu", "--served-model-name", MODEL_NAME),
    *("--kv-cache-memory-bytes", str(1 << 27), "--cpu-threads", "1"),
)
_CLONE_NEWNET = 0x40000000
T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """Where a node runs: its address, and what a command starts with to run there."""

    address: str
    prefix: tuple[str, ...] = ()
    device: str = "lo"


@dataclass
class NodeProcess:
    """`python -m atom.entrypoints.openai_server` of one node; ended for certain by `kill`."""

    rank: int
    host: Host
    args: Sequence[str]
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", "atom.entrypoints.openai_server", *self.args]
        self.log: list[str] = []
        self.url = ""
        self._directory = tempfile.TemporaryDirectory(prefix="n-")
        self.process = subprocess.Popen(
            [*self.host.prefix, *command],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": self._directory.name, **self.variables},
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"ready .*(https?://\S+)", line):
                self.url = found[1]

    def text(self) -> str:
        return "".join(self.log)

    def until(self, pattern: str, deadline_s: float = JOIN_DEADLINE_S) -> float:
        """Seconds until the log has a line that matches."""
        begun = time.monotonic()
        while not re.search(pattern, self.text()):
            assert self.process.poll() is None, f"node {self.rank} ended:\n{self.text()}"
            assert time.monotonic() - begun < deadline_s, f"no {pattern!r} in time:\n{self.text()}"
            time.sleep(0.02)
        return time.monotonic() - begun

    def http_url(self) -> str:
        """URL of its own frontends, with --frontend-per-node."""
        found = re.search(r"serving HTTP on (\S+) port (\d+)", self.text())
        assert found is not None, self.text()
        return f"http://{found[1]}:{found[2]}"

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(STOP_DEADLINE_S)

    def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def children(self) -> dict[int, str]:
        """Process ids and command lines of the node's processes."""
        return child_processes(self.process.pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_DEADLINE_S)
        self._reader.join(STOP_DEADLINE_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        self._directory.cleanup()


class Nodes:
    """The nodes of one server. `start` any of them; all are ended with the block of `nodes_of`."""

    def __init__(self, hosts: Sequence[Host], args: Sequence[str]):
        self.hosts = hosts
        self._args = args
        self.started: list[NodeProcess] = []

    def start(self, rank: int, *more: str, variables: dict[str, str] | None = None) -> NodeProcess:
        """Start the node of this rank with the common arguments and `more`."""
        host = self.hosts[rank]
        place = (
            *("--nnodes", str(len(self.hosts)), "--node-rank", str(rank)),
            *("--master-addr", self.hosts[0].address, "--master-port", str(MASTER_PORT)),
            *("--local-addr", host.address, "--host", host.address, "--server-port", "0"),
        )
        secret = {"ATOM_CLUSTER_SECRET": SECRET}
        made = NodeProcess(rank, host, [*place, *self._args, *more], secret | (variables or {}))
        self.started.append(made)
        return made

    def start_all(self) -> list[NodeProcess]:
        """Start all of them; returns once the server is ready."""
        made = [self.start(rank) for rank in range(len(self.hosts))]
        made[0].until("ready .*http")
        return made

    def kill(self) -> None:
        for each in self.started:
            with contextlib.suppress(Exception):
                each.kill()


@contextlib.contextmanager
def nodes_of(hosts: Sequence[Host], *args: str) -> Iterator[Nodes]:
    made = Nodes(hosts, args)
    try:
        yield made
    finally:
        made.kill()


def loopback_hosts(count: int) -> list[Host]:
    """Addresses of the loopback interface that nothing else uses: their ports are free."""
    network = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
    return [Host(f"{network}.{number + 1}") for number in range(count)]


@contextlib.contextmanager
def network_hosts(count: int) -> Iterator[list[Host]]:
    """Network namespaces on one bridge, each with an address of its own; needs the rights to make them."""
    tag = f"{os.getpid() % 100000:05d}"
    bridge, network = f"br{tag}", "10.213.7"
    made = []
    try:
        # The bridge is in a namespace, too: nothing of this host is changed.
        _ip("netns", "add", f"s{tag}")
        made.append(f"s{tag}")
        _ip("-n", f"s{tag}", "link", "add", bridge, "type", "bridge")
        _ip("-n", f"s{tag}", "link", "set", bridge, "up")
        hosts = []
        for number in range(count):
            name, port = f"h{tag}{number}", f"v{tag}{number}"
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", f"s{tag}", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", f"s{tag}", "link", "set", port, "master", bridge, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "address", "add", f"{network}.{number + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            hosts.append(Host(f"{network}.{number + 1}", ("ip", "netns", "exec", name), port))
        yield hosts
    finally:
        for name in reversed(made):
            _ip("netns", "delete", name)


def set_link(host: Host, up: bool) -> None:
    """Connect or cut the host: no packet and no FIN gets through a cut link."""
    switch = "s" + host.device[1:6]
    _ip("-n", switch, "link", "set", host.device, "up" if up else "down")


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(args)}: {done.stderr}"


def inside(host: Host, function: Callable[[], T]) -> T:
    """`function()`, called in a thread that is in the host's network namespace."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            if host.prefix:
                with open(f"/run/netns/{host.prefix[-1]}") as namespace:
                    libc = ctypes.CDLL(None, use_errno=True)
                    assert libc.setns(namespace.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return future.result()
