"""Where this node is among the others, and how to reach the master."""

import contextlib
import ipaddress
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from atom.shared.config.fields import ConfigError
from atom.shared.config.nodes import NodesConfig
from atom.shared.utils.endpoint import endpoint_key, tcp_endpoint
from atom.shared.utils.interfaces import address_on_route_to, find_address, interface_of, resolve_address
from atom.shared.utils.logger import get_logger
from atom.shared.utils.net import ListenPort
from atom.supervisor.node_links import link_name

__all__ = ["NodePlacement", "find_node_placement"]

_RETRY_S = 1.0


@dataclass(frozen=True)
class NodePlacement:
    """Rank and addresses of this node. The defaults are those of the only node."""

    rank: int = 0
    address: str = "127.0.0.1"
    """Address by which the other nodes reach this one."""
    interface: str = "lo"
    master_name: str = ""
    """--master-addr."""
    master_address: str = ""
    master_port: int = 0
    secret: bytes = b""
    join_timeout: float = 0.0
    """Seconds."""
    frontend_per_node: bool = False
    first_device: int = 0
    link: ListenPort | None = None
    """On node 0: the socket at the master's port."""

    @property
    def master(self) -> str:
        """The master's address, for people."""
        return f"{self.master_address}:{self.master_port}"

    def located(self) -> "NodePlacement":
        """The same with the current address of the master's name: a pod that was replaced has another."""
        with contextlib.suppress(OSError, UnicodeError):
            return replace(self, master_address=resolve_address(self.master_name))
        return self

    def endpoint(self, binds: bool = False) -> str:
        """Where the nodes join, for them or for the master itself."""
        key = endpoint_key(self.secret, link_name(self.master_port))
        fd = None
        if binds and self.link is not None:
            fd = os.dup(self.link.open(0).fileno())  # libzmq closes it
        return tcp_endpoint(key, self.master_address, self.master_port, fd)


def find_node_placement(config: NodesConfig, on_turn: Callable[[], None] = lambda: None) -> NodePlacement:
    """Resolve the addresses; on node 0 also take the master's port.

    Calls `on_turn` every second while it waits for the master's name. Raises ConfigError, ListenError.
    """
    assert config.master_addr is not None
    secret = _secret(config)
    master = _master_address(config.master_addr, config.join_timeout, on_turn)
    if config.node_rank == 0:
        _check_master(config.master_addr, master)
    address = _own_address(config, master)
    interface = interface_of(address)
    assert interface is not None
    return NodePlacement(
        config.node_rank,
        address,
        interface,
        config.master_addr,
        master,
        config.master_port,
        secret,
        config.join_timeout,
        config.frontend_per_node,
        link=None if config.node_rank else ListenPort(master, config.master_port, flag="--master-port"),
    )


def _secret(config: NodesConfig) -> bytes:
    """The cluster secret; warns of a file that every user of this host can read."""
    secret = config.secret()
    path = config.cluster_secret_file
    if path is not None and Path(path).expanduser().stat().st_mode & 0o004:
        get_logger().warning("--cluster-secret-file %s: all users of this host can read it: chmod 600", path)
    return secret


def _check_master(name: str, address: str) -> None:
    """Raises ConfigError unless the master's address is one of node 0's own."""
    interface = interface_of(address)
    if interface is None:
        raise ConfigError(f"--master-addr {name} is {address}, which this node, the master, has not")
    if interface == "lo" and name != address:  # as /etc/hosts may say of the name of this host
        get_logger().warning(
            "--master-addr %s is %s here: other hosts cannot reach it; give an address in their network",
            name,
            address,
        )


def _check_literal(name: str) -> None:
    """Raises ConfigError for an address that node 0 cannot have."""
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return  # a name
    if address.version == 6 or address.is_unspecified:
        what = "an IPv6 address" if address.version == 6 else "not the address of one host"
        raise ConfigError(f"--master-addr {name} is {what}: give an IPv4 address of node 0, or its name")


def _master_address(name: str, timeout_s: float, on_turn: Callable[[], None]) -> str:
    """Address of the master; its name may be known only once its host, or its pod, has started."""
    _check_literal(name)
    deadline = time.monotonic() + timeout_s
    noted = False
    while True:
        try:
            return resolve_address(name)
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"--master-addr {name}: no IPv4 address after {timeout_s:.0f} s: {error}"
                ) from None
        if not noted:
            noted = True
            get_logger().info("waiting for the name of node 0, %s (%.0f s)", name, timeout_s)
        time.sleep(_RETRY_S)
        on_turn()


def _own_address(config: NodesConfig, master: str) -> str:
    try:
        if config.local_addr is not None:
            return find_address(config.local_addr)
        return master if config.node_rank == 0 else address_on_route_to(master)
    except ValueError as error:
        raise ConfigError(f"--local-addr: {error}") from None
    except OSError as error:
        raise ConfigError(f"--master-addr {master}: {error.strerror}: no route from this node") from None
