"""Several nodes as processes of this host: on loopback addresses, or in network namespaces."""

import contextlib
import ctypes
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from tests.helpers.servers.random_server import MODEL_NAME
from tests.helpers.servers.server import ServerProcess

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


class NodeProcess(ServerProcess):
    """`python -m atom.entrypoints.openai_server` of one node."""

    def __init__(self, rank: int, host: Host, args: Sequence[str], variables: Mapping[str, str]):
        self.rank = rank
        self.host = host
        self._directory = tempfile.TemporaryDirectory(prefix="n-")
        command = [*host.prefix, sys.executable, "-m", "atom.entrypoints.openai_server", *args]
        super().__init__(command, {"TMPDIR": self._directory.name, **variables})

    def http_url(self) -> str:
        """URL of its own frontends, with --frontend-per-node."""
        found = re.search(r"serving HTTP on (\S+) port (\d+)", self.text())
        assert found is not None, self.text()
        return f"http://{found[1]}:{found[2]}"

    def kill(self) -> None:
        super().kill()
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
