"""The two halves of an upgrade without a break: a new server takes over, and the running one hands over."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atom.shared.config.cli import ConfigError
from atom.shared.config.server import ServerConfig
from atom.shared.config.sources import variable_of
from atom.shared.messages.codec import WireError
from atom.shared.messages.handover import Leaving, Left, ListeningSockets
from atom.shared.messages.resume import Claimed
from atom.shared.utils.logger import get_logger
from atom.shared.utils.net import AdminSocket, ListenPort
from atom.shared.utils.process import module_environment
from atom.supervisor import StartError, Supervisor
from atom.supervisor.handover import DeclinedError, HandoverError, NewServer, OldServer

__all__ = ["UPGRADE_SIGNAL", "HandOver", "Successor", "TakeOver", "settings_of_sockets"]

UPGRADE_SIGNAL = signal.SIGUSR2
"""A server that gets it starts another one like itself, which replaces it."""
_FIELD = "upgrade_from"
_FLAG = "--upgrade-from"
_STOP_S = 10.0
"""For the end of a server that was to replace this one."""


class TakeOver:
    """In a new server: the running one, which it replaces."""

    def __init__(self, old: OldServer, supervisor: Supervisor, admin: AdminSocket | None):
        """`admin` is the socket of the administration here, which may be that of the old server."""
        self._old = old
        self._admin = admin
        self._has_admin = False
        if old.admin is not None:
            self._has_admin = admin is not None and admin.socket is old.admin[1]
            if not self._has_admin:
                old.admin[1].close()
        self._supervisor = supervisor
        self._handed = supervisor.handed
        self._handed.is_pending = True

    def starting(self) -> None:
        """This server still starts. To be called often. Raises StartError if the old one goes on."""
        try:
            self._old.starting()
        except DeclinedError as error:
            raise StartError(f"{_FLAG}: {error}") from None

    def finish(self, model: dict[str, str]) -> None:
        """This server accepts connections: the old one stops accepting them. `model` is that of this one.

        Raises StartError if the old one goes on.
        """
        meanwhile = lambda: self._supervisor.check(0.0)  # noqa: E731
        try:
            self._handed.difference = self._old.serving(model, self._has_admin, meanwhile)
        except DeclinedError as error:
            raise StartError(f"{_FLAG}: {error}") from None
        except HandoverError as error:
            get_logger().warning("no streams are taken over: %s", error)
            self._old.close()
        if self._handed.difference:
            get_logger().warning(
                "streams of the earlier server cannot go on here: %s", self._handed.difference
            )

    def started(self) -> None:
        """The start is over: until then the old server goes on if this one ends, with its administration."""
        if self._has_admin and self._admin is not None:
            self._admin.is_own = True

    def receive(self) -> None:
        """Keep the streams that have come since the last call."""
        for claimed in self._old.streams():
            try:
                self._handed.add(claimed)
            except WireError as error:
                get_logger().error("a stream of the earlier server cannot be read: %s", error)
        if self._handed.is_pending and not self._old.is_connected:
            self._handed.is_pending = False
            get_logger().info("the earlier server has ended; streams taken over: %d", len(self._handed))

    def stopping(self) -> None:
        """Tell the old server that this one is stopped, and that it is not to go on for it."""
        self._old.stopping()

    def died(self) -> None:
        """Leave the path of the administration to the old server, which goes on: this one ends by itself."""
        if self._has_admin and self._admin is not None and not self.is_done:
            self._admin.is_own = False

    @property
    def is_done(self) -> bool:
        """Whether the old server has ended."""
        return not self._handed.is_pending


class HandOver:
    """In the running server: its sockets and streams, for a new one."""

    def __init__(
        self,
        supervisor: Supervisor,
        port: ListenPort,
        admin: AdminSocket | None,
        server: ServerConfig,
        declines: str = "",
    ):
        """`declines` says why it cannot be replaced; empty if it can."""
        self._supervisor = supervisor
        self._port = port
        self._admin = admin
        self._server = server
        self._new = NewServer(supervisor.run_dir, self._offer, declines)

    @property
    def new_pid(self) -> int:
        """Process id of the new server; 0 without one."""
        return self._new.pid

    def close(self) -> None:
        """Close the socket for new servers."""
        self._new.close()

    def _offer(self) -> tuple[ListeningSockets, list[int]]:
        found = sorted(self._port.sockets.items())
        fds = [each.fileno() for _, each in found]
        address = ""
        if self._admin is not None:
            address = self._admin.address
            fds.append(self._admin.socket.fileno())
        indexes = [index for index, _ in found]
        count = self._server.api_server_count
        next_life = self._supervisor.next_life
        offer = ListeningSockets(self._server.host, self._port.port, indexes, count, address, next_life)
        return offer, fds

    def wanted(self) -> dict[str, str] | None:
        """What the model of a new server is that accepts connections now; None while there is none."""
        serving = self._new.poll()
        if serving is None:
            return None
        if serving.has_admin and self._admin is not None:
            self._admin.is_own = False
        return serving.model

    def leave(self, difference: str) -> None:
        """Accept no further connections. `difference`: why the new server cannot go on with streams."""
        self._supervisor.leave()
        self._send(Leaving(difference))

    def has_lost_new(self) -> bool:
        """Whether the new server has died since `leave`."""
        return self._new.has_died()

    def come_back(self) -> None:
        """Accept connections again, instead of the new server, which has died."""
        if self._admin is not None:
            self._admin.is_own = True
        self._supervisor.come_back()

    def send_streams(self) -> None:
        """After the end of the frontends: what clients may resume at the new server."""
        count = 0
        for claimed in self._supervisor.take_streams():
            if not self._send(claimed):
                return
            count += 1
        self._send(Left())
        get_logger().info("streams handed over: %d", count)

    def _send(self, message: Leaving | Claimed | Left) -> bool:
        try:
            self._new.send(message)
        except HandoverError as error:
            get_logger().error("the new server gets no further streams: %s", error)
            return False
        return True


class Successor:
    """A server with the command line of this one, that this one has started to be replaced by it."""

    def __init__(self, environment: Mapping[str, str]):
        """`environment` has further variables, for the service manager."""
        command = [sys.executable, "-P", "-m", "atom.launch", *without_upgrade(sys.argv[1:])]
        own = {variable_of(_FIELD): str(os.getpid())}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**module_environment(), **environment, **own},
        )
        get_logger().info("process %d starts, to replace this server", self._process.pid)

    def has_failed(self) -> bool:
        """Whether it has ended, which is logged."""
        if (status := self._process.poll()) is None:
            return False
        get_logger().error("this server goes on: the one that was to replace it has ended (%d)", status)
        return True

    def stop(self) -> None:
        """Send it SIGTERM: this server is stopped before it has been replaced."""
        if self._process.poll() is None:
            get_logger().info("process %d, which was to replace this server, is stopped", self._process.pid)
            self._process.terminate()

    def close(self) -> None:
        """After `stop`: wait for its end, and kill it if that takes too long."""
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            get_logger().warning("process %d has not ended, and is killed", self._process.pid)
            self._process.kill()
            self._process.wait()


def without_upgrade(arguments: list[str]) -> list[str]:
    """Command line arguments without --upgrade-from and its value."""
    kept = []
    skips = False
    for argument in arguments:
        name, _, value = argument.replace("_", "-").partition("=")
        if not skips and name == _FLAG:
            skips = not value
        elif skips:
            skips = False
        else:
            kept.append(argument)
    return kept


def settings_of_sockets(server: ServerConfig, offer: ListeningSockets, explicit: set[str]) -> ServerConfig:
    """`server` with the address that the sockets of the running server have.

    Raises ConfigError where `explicit` settings differ: sockets cannot be moved.
    """
    values: dict[str, Any] = {
        "host": offer.host,
        "server_port": offer.port,
        "api_server_count": offer.api_server_count,
    }
    for name, value in values.items():
        given = getattr(server, name)
        if name in explicit and given != value and not (name == "server_port" and given == 0):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} {given}: the server of {_FLAG} has {value}, and its sockets are taken over "
                f"as they are: leave {flag} out, or stop that server first"
            )
    return replace(server, **values)
