"""One HTTP process, on a socket that the supervisor holds."""

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from atom.shared.messages.launch import FrontendLaunch
from atom.shared.messages.supervisor import INTERRUPT_SIGNAL, Engines
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.net import ListenPort
from atom.supervisor.domain import Domain, DomainSettings
from atom.supervisor.failure import Failure
from atom.supervisor.life import Life
from atom.supervisor.node_links import RemotePort
from atom.supervisor.process import ProcessSpec, Role

_FRONTEND = "frontend"
NO_FD = -1
"""In a launch message for another node, whose supervisor fills it in."""


class Frontend(Domain):
    """Frontend `index` of all nodes. While it is down, the others of its node accept its connections.

    Without others they wait for its next life. If those are on other nodes, its socket is closed until then
    after a second failure in a row: a load balancer notices that.
    """

    def __init__(
        self,
        index: int,
        settings: DomainSettings,
        port: ListenPort | RemotePort,
        engines: Callable[[], Engines],
        admin: socket.socket | None = None,
    ):
        """`engines` returns the current engines; `admin` is the listening socket of the administration."""
        self._each = settings.local.server.api_server_count
        self._index = index
        self._node = settings.placement.frontend_nodes[index // self._each]
        self._http = index % self._each
        self._num_frontends = self._each * len(settings.placement.frontend_nodes)
        self._port = port
        self._engines = engines
        self._admin = admin
        self._started_at = time.monotonic()
        self._leaves = False
        name = _FRONTEND if self._num_frontends == 1 else f"{_FRONTEND} {index}"
        super().__init__(name, settings, {self._node})

    def _open(self, number: int) -> Life:
        settings = self._settings
        directory = Path(settings.local.run_dir, f"{_FRONTEND}-{self._index}.{number}")
        return Life(settings.context, directory, settings.config.reliability.hang_timeout)

    def _launch(self, life: Life) -> None:
        node = self._settings.nodes[self._node]
        engines = self._engines()
        passed = []
        others = {}
        if isinstance(self._port, ListenPort):
            first = self._index - self._http
            others = {first + i: fd for i, fd in self._port.descriptors_without(self._http).items()}
            passed = [self._port.open(self._http).fileno(), *others.values()]
        admin_fd = None if self._admin is None else self._admin.fileno()
        launch = FrontendLaunch(
            config=node.info.config,
            server=node.info.server,
            checkpoint=node.info.checkpoint,
            engines=engines.engines,
            supervisor=node.endpoint(life.name, "supervisor"),
            listen_fd=passed[0] if passed else NO_FD,
            index=self._index,
            num_frontends=self._num_frontends,
            control=f"ipc://{node.info.run_dir}/control",
            run_dir=node.info.run_dir,
            life=self.number,
            state=engines.state,
            admin_fd=admin_fd,
            first_life=self._settings.first_life,
            started_at=self._started_at,
            other_fds=others,
        )
        if admin_fd is not None:
            passed.append(admin_fd)
        life.spawn(node, ProcessSpec(self.name, Role.FRONTEND, launch, passed, self._http))

    def _send_exit_reason(self, life: Life, failure: Failure) -> None:
        if self._restarts.in_a_row > 1 and self._num_frontends > 1 and self._each == 1:
            self.refuse_connections()

    @property
    def accepts(self) -> bool:
        """Whether it accepts connections."""
        return self.is_alive and self.is_ready and self.responds

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended."""
        return self.life is not None and self.life.is_alive

    def failure(self) -> Failure | None:
        """As the base class; once a frontend that was stopped has ended, its socket is closed."""
        has_ended = self.life is not None and self.life.is_stopping and not self.life.is_alive
        if has_ended and not self._leaves:
            self.refuse_connections()
        return super().failure()

    def unclean_end(self) -> str:
        """How its process has ended when stopped, if requests were cut off or failed; empty if none were."""
        if self.life is None:
            return ""
        for child in self.life.children.values():
            if child.is_alive:
                return "did not end in time, and was killed"
            if child.process.returncode not in (
                ExitStatus.DONE,
                -signal.SIGTERM,
                -INTERRUPT_SIGNAL,
            ):  # by a signal: it had not begun to serve
                return child.end
        return ""

    def leave(self) -> None:
        """Another server accepts on the socket: the process ends by itself, after its connections."""
        self._leaves = True
        if self.life is not None:
            for child in self.life.children.values():
                child.stopping = True

    def come_back(self) -> None:
        """Accept connections again after the other server's death; starts a process if this one has ended."""
        self._leaves = False
        if self.is_alive and self.life is not None:
            for child in self.life.children.values():
                child.stopping = False
            return
        if self.life is not None:
            self.life.close()
        self.restart()

    def terminate(self) -> None:
        """Let running requests finish, and end then."""
        if self.life is not None:
            self.life.terminate()

    def interrupt(self) -> None:
        """End running requests with errors, and then the process."""
        if self.life is not None:
            self.life.terminate(INTERRUPT_SIGNAL)

    def close(self) -> None:
        """Kill the process; connections are refused from now on."""
        self.refuse_connections()
        super().close()

    def refuse_connections(self) -> None:
        """Close the supervisor's copy of the socket: it accepts connections until the process ends."""
        self._port.close(self._http)
