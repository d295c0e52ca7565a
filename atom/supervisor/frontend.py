"""One HTTP process, on a socket that the supervisor holds."""

import socket
import time
from collections.abc import Callable

from atom.config.server import ServerConfig
from atom.messages.launch import FrontendLaunch
from atom.messages.supervisor import Engines
from atom.supervisor.domain import Domain, Setup
from atom.supervisor.failure import Failure
from atom.supervisor.life import Life
from atom.utils.net import ListenPort

_FRONTEND = "frontend"


class Frontend(Domain):
    """Frontend `index`. While it is down, connections to its socket wait for its next life.

    After a second failure in a row its socket is closed until then, so that they reach the others.
    """

    def __init__(
        self,
        index: int,
        setup: Setup,
        server: ServerConfig,
        port: ListenPort,
        engines: Callable[[], Engines],
        admin: socket.socket | None = None,
    ):
        """`engines` returns the present ones; `admin` is the listening socket of the administration."""
        self._index = index
        self._server = server
        self._port = port
        self._engines = engines
        self._admin = admin
        self._started_at = time.monotonic()
        super().__init__(_FRONTEND if server.api_server_count == 1 else f"{_FRONTEND} {index}", setup)

    def _open(self, number: int) -> Life:
        setup = self._setup
        directory = setup.run_dir / f"{_FRONTEND}-{self._index}.{number}"
        return Life(setup.context, directory, setup.config.reliability.hang_timeout)

    def _launch(self, life: Life) -> None:
        setup, descriptor, engines = self._setup, self._port.open(self._index).fileno(), self._engines()
        admin_fd = None if self._admin is None else self._admin.fileno()
        launch = FrontendLaunch(
            setup.config,
            self._server,
            setup.checkpoint,
            engines.engines,
            life.endpoint("supervisor"),
            descriptor,
            self._index,
            self._server.api_server_count,
            control=f"ipc://{setup.run_dir}/control",
            metrics_dir=str(setup.run_dir),
            life=self.number,
            state=engines.state,
            admin_fd=admin_fd,
            started_at=self._started_at,
        )
        passed = [descriptor] if admin_fd is None else [descriptor, admin_fd]
        life.spawn(self.name, "frontend.main", launch, pass_fds=passed)

    def _farewell(self, life: Life, failure: Failure) -> None:
        if self._restarts.in_a_row > 1 and self._server.api_server_count > 1:
            self.refuse_connections()

    @property
    def is_alive(self) -> bool:
        """Whether its process lives."""
        return self.life is not None and self.life.is_alive

    def failure(self) -> Failure | None:
        """As of every domain; the socket of a frontend that was stopped is closed when it has ended."""
        if self.life is not None and self.life.is_stopping and not self.life.is_alive:
            self.refuse_connections()
        return super().failure()

    def terminate(self) -> None:
        """Send SIGTERM: the first lets running requests finish, the second ends them with errors."""
        if self.life is not None and self.life.is_alive:
            self.life.terminate()

    def close(self) -> None:
        """Kill the process; connections are refused from now on."""
        self.refuse_connections()
        super().close()

    def refuse_connections(self) -> None:
        """Close the supervisor's copy of the socket: connections end with the process."""
        self._port.close(self._index)
