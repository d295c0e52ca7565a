"""The supervisor: starts the failure domains, restarts those that fail, and ends them all."""

import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum

import zmq

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.model import ModelConfig
from atom.shared.config.server import ServerConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.admin import ServerState
from atom.shared.messages.launch import EngineAddress
from atom.shared.messages.nodes import NodeInfo
from atom.shared.messages.resume import Claimed
from atom.shared.messages.supervisor import Engines, Progress, RestartEngines, SetServerState, WantTrial
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.logger import get_logger, set_log_level
from atom.shared.utils.net import ListenPort
from atom.shared.utils.run_directory import RunDirectory
from atom.supervisor.control import Control, Wanted
from atom.supervisor.domain import Domain, DomainSettings
from atom.supervisor.engine_group import EngineGroup
from atom.supervisor.failure import Failure, StartError
from atom.supervisor.frontend import Frontend
from atom.supervisor.handed_streams import HandedStreams, take_streams
from atom.supervisor.identity import identity_of
from atom.supervisor.life import Life
from atom.supervisor.node import LocalNode, Node
from atom.supervisor.node_links import NodeLinks, NodeSettings, RemotePort
from atom.supervisor.node_placement import NodePlacement
from atom.supervisor.placement import NodePorts, Placement
from atom.supervisor.prepare import Prepared, prepare
from atom.supervisor.trials import Trials

STALL_NOTICE_S = 60.0
JOIN_NOTICE_S = 10.0
ENGINE_STOP_S = 10.0
_POLL_S = 0.1
# Time for a frontend that is interrupted to send its clients error events.
_CLIENT_ERRORS_S = 5.0
_END_POLL_S = 0.02
# For frontends to send the requests of an engine elsewhere before it ends.
_NOTICE_S = 0.5
_RESTARTED = "an administrator has restarted it"
_NO_DRAFTS = SpeculativeConfig()


class _Phase(Enum):
    """Phase of the server; the value says what a failure leads to."""

    STARTING = "a StartError, or a restart if others serve"
    SERVING = "a restart"
    STOPPING = "the end of its domain"


class Supervisor:
    """Owns the run directory and all child processes.

    Use as a context manager, or call `close`. `on_progress` receives the progress of loading. `on_turn`
    is called several times a second while the supervisor prepares, starts, watches and stops its children.
    Until `restart_failed`, a failure is a StartError, unless an engine and a frontend serve already.
    """

    def __init__(
        self,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_turn: Callable[[], None] = lambda: None,
        first_life: int = 0,
    ):
        """`first_life`: as in FrontendLaunch, for a server that replaces another one."""
        self._first_life = first_life
        self.handed = HandedStreams()
        """Streams of the server that this one replaces."""
        self._left = HandedStreams()
        """Streams without an engine, for a server that replaces this one."""
        self._is_leaving = False
        self._to_restart: deque[EngineGroup] = deque()  # the first one is ending, starting, or the next
        self._restarted: set[EngineGroup] = set()
        self._directory = RunDirectory()
        self.run_dir = self._directory.path
        self._on_progress = on_progress
        self._on_turn = on_turn
        self._context = zmq.Context()
        self._preparation: Life | None = None
        self._control: Control | None = None
        self._settings: DomainSettings | None = None
        self._nodes: dict[int, Node] = {}
        self._ports: NodePorts | None = None
        self._links: NodeLinks | None = None
        self._node = NodePlacement()
        self._no_engine_since: float | None = None
        self._engines: list[EngineGroup] = []
        self._frontends: list[Frontend] = []
        self._down: list[int] = []  # numbers of the frontends that accept no connections
        self._phase = _Phase.STARTING
        self._server_state = ServerState()
        self._trials = Trials()
        self.fault: Failure | None = None
        """Why requests were cut off or failed since the supervisor is stopping; None if none were."""
        self._last_engine_failure: Failure | None = None
        self.failure = ""
        """Why the server ends, for the other nodes; empty for a regular end."""

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, Exception):
            self.failure = str(error)
        self.close()

    @property
    def engines(self) -> list[EngineAddress]:
        """The engines that run or start now."""
        return [address for group in self._engines for address in group.addresses]

    @property
    def details(self) -> dict[str, int | str]:
        """Figures for the banner, from an engine of the first group; empty before one is ready."""
        life = self._engines[0].life if self._engines else None
        return next((report.detail for report in life.reports.values()), {}) if life is not None else {}

    @property
    def is_working(self) -> bool:
        """Whether an engine responds, starts or is about to start again."""
        return any(group.responds or group.is_down_for_now for group in self._engines)

    # Start

    def prepare(self, config: ModelConfig, speculative: SpeculativeConfig = _NO_DRAFTS) -> Prepared:
        """Run the preparation step in a process of its own; raises StartError."""
        self._preparation = Life(self._context, self.run_dir / "prepare", 60.0, self._on_progress)
        result = prepare(self._preparation, config, speculative, self._on_turn)
        self._preparation.close()
        self._preparation = None
        return result

    def gather_nodes(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        server: ServerConfig | None = None,
        node: NodePlacement | None = None,
    ) -> None:
        """Open the ports of this node, and wait for all others. Raises StartError, ListenError."""
        self._server_state = ServerState(config.observability.log_level)
        node = self._node = node or self._node
        placement = Placement(config.parallel, node.frontend_per_node)
        self._ports = NodePorts(placement, 0, node.address, config.parallel.port)
        info = NodeInfo(
            0,
            node.address,
            node.interface,
            str(self.run_dir),
            config,
            checkpoint,
            server or ServerConfig(),
            self._ports.ports,
            node.first_device,
        )
        self._nodes[0] = LocalNode(info, self._context)
        self._settings = DomainSettings(
            self._context, self._nodes, placement, config, self._on_progress, node.secret, self._first_life
        )
        if config.parallel.nnodes > 1:
            identity = identity_of(config, checkpoint, server if node.frontend_per_node else None)
            settings = NodeSettings(node.endpoint(binds=True), config.parallel.nnodes, identity, self.run_dir)
            self._links = NodeLinks(self._context, settings, self._nodes)
            self._wait_for_nodes(self._links)

    def _wait_for_nodes(self, links: NodeLinks) -> None:
        begun = time.monotonic()
        notice_at = 0.0
        while missing := links.missing:
            passed = time.monotonic() - begun
            who = f"{'nodes' if len(missing) > 1 else 'node'} {', '.join(map(str, missing))}"
            if passed > self._node.join_timeout:
                raise StartError(f"waited {passed:.0f} s for {who} to join at {self._node.master}")
            if passed >= notice_at:
                left = self._node.join_timeout - passed
                get_logger().info("waiting for %s to join at %s (%.0f s)", who, self._node.master, left)
                notice_at = passed + JOIN_NOTICE_S
            self._on_turn()
            time.sleep(_POLL_S)

    def start_engines(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        """Start the engine of every data-parallel rank; `wait_ready` waits for them."""
        if self._settings is None:
            self.gather_nodes(config, checkpoint)
        settings = self._domain_settings
        seed = secrets.randbits(64)
        self._engines = [EngineGroup(group, settings, seed) for group in settings.placement.groups]
        for group in self._engines:
            group.start()

    def start_frontends(self, port: ListenPort, admin: socket.socket | None = None) -> None:
        """Start the HTTP processes of all nodes that have them.

        Frontends of this node get the port, which is already bound; the first one also serves `admin`.
        """
        settings = self._domain_settings
        control = f"ipc://{self.run_dir}/control"
        self._control = Control(self._context, control, self.handed.take, self._left.add)
        each = settings.local.server.api_server_count
        for index in range(each * len(settings.placement.frontend_nodes)):
            node = index // each
            ports = RemotePort(settings.nodes, node) if node else port
            frontend = Frontend(index, settings, ports, self._engine_state, None if index else admin)
            self._frontends.append(frontend)
        self._publish()
        for frontend in self._frontends:
            frontend.start()

    @property
    def _domain_settings(self) -> DomainSettings:
        assert self._settings is not None, "the nodes are gathered first"
        return self._settings

    def wait_ready(self) -> None:
        """Wait until everything that was started is ready. Raises StartError when a part fails for good."""
        notice_at = time.monotonic() + STALL_NOTICE_S
        while waiting := [domain.label for domain in self._domains() if not domain.is_ready]:
            self.check()
            if time.monotonic() > notice_at:
                notice_at = time.monotonic() + STALL_NOTICE_S
                get_logger().info("still waiting for: %s", ", ".join(waiting))

    def restart_failed(self) -> None:
        """From now on a domain that fails is restarted."""
        self._phase = _Phase.SERVING

    # Work

    def check(self, wait_s: float = _POLL_S) -> None:
        """Process the children's messages for up to `wait_s`, end failed domains and start due ones.

        Raises StartError when a domain has failed before `restart_failed` and is not retried, and when no
        engine or no frontend is left.
        """
        self._receive(wait_s)
        self._on_turn()
        self.handed.expire()
        self._left.expire()
        for domain in self._domains():
            if failure := domain.failure():
                self._failed(domain, failure)
            elif domain.is_due:
                domain.restart()
                self._publish()
        down = [index for index, frontend in enumerate(self._frontends) if not frontend.accepts]
        if down != self._down:
            self._down = down
            self._publish()
        self._restart_next()
        self._check_absence()

    def _restart_next(self) -> None:
        """Restart the next of the engines that an administrator restarts, once the one before is ready.

        Its frontends first send its requests to other engines, and learn that no request has ended it.
        """
        group = next(iter(self._to_restart), None)
        if group is None or self._phase is not _Phase.SERVING:
            self._to_restart.clear()
            self._restarted.clear()
            return
        if group in self._restarted:
            if group.is_ready or group.is_over:
                self._to_restart.popleft()
                self._restarted.discard(group)
                self._publish()
        elif not group.is_ready:  # it is restarted already
            self._to_restart.popleft()
            self._publish()
        else:
            self._restarted.add(group)
            group.leave(_RESTARTED)
            self._publish()
            self._receive(_NOTICE_S)
            group.restart_now()
            self._publish()

    def _check_absence(self) -> None:
        """Raises StartError when for the whole join timeout no engine could start for lack of a node."""
        absent = next((group.absent for group in self._engines if group.absent), "")
        if not absent or any(group.life for group in self._engines):
            self._no_engine_since = None
            return
        since = self._no_engine_since = self._no_engine_since or time.monotonic()
        if time.monotonic() - since > self._node.join_timeout:
            raise StartError(f"{absent}, and has not joined again within {self._node.join_timeout:.0f} s")

    def _receive(self, wait_s: float) -> None:
        lives = [domain.life for domain in self._domains() if domain.life is not None]
        poller = zmq.Poller()
        for life in lives:
            poller.register(life.socket, zmq.POLLIN)
        if self._control is not None:
            poller.register(self._control.socket, zmq.POLLIN)
        poller.poll(int(wait_s * 1000))
        for life in lives:
            life.receive()
        if self._control is not None:
            for wanted in self._control.receive(self._engine_state()):
                self._change(wanted)
        while self._links is not None and self._links.wanted:
            self._change(self._links.wanted.popleft())
        for index, frontend in enumerate(self._frontends):
            if not frontend.is_alive:
                self._change(WantTrial(index, 0))

    def _failed(self, domain: Domain, failure: Failure) -> None:
        domain.keep_stacks(failure)
        is_starting = self._phase is _Phase.STARTING
        if is_starting and not self._is_retried(failure):
            raise StartError(failure.text, failure.status)
        is_needed = self._is_leaving and not isinstance(domain, Frontend)  # for the requests that there are
        domain.fail(failure, restart=is_needed or self._phase is not _Phase.STOPPING)
        if is_starting and domain.is_over:
            raise StartError(failure.text, failure.status)
        self._publish()
        if self._phase is _Phase.STOPPING:
            # Whether requests fail for lack of an engine is what the frontends say at their ends.
            if isinstance(domain, Frontend):
                self.fault = self.fault or failure
            else:
                self._last_engine_failure = failure
            return
        for domains in (self._engines, self._frontends):
            if domains and all(each.is_over for each in domains):
                raise StartError(domain.cause)

    def _is_retried(self, failure: Failure) -> bool:
        """Whether a failure before all are ready is as a later one: clients are served already.

        What the user must change ends the start at once.
        """
        serves = all(any(each.is_ready for each in domains) for domains in (self._engines, self._frontends))
        return serves and failure.status == ExitStatus.FAILURE

    def _domains(self) -> list[Domain]:
        return [*self._engines, *self._frontends]

    def _engine_state(self) -> Engines:
        ended = [ended for group in self._engines for ended in group.ended]
        return Engines(
            self.engines,
            ended,
            self._server_state,
            self._trials.current,
            self._is_leaving,
            [rank for group in self._to_restart for rank in group.ranks],
            self._down,
        )

    @property
    def engine_state(self) -> Engines:
        """The engines that run or start now, and why the last lives of others have ended."""
        return self._engine_state()

    @property
    def is_ready(self) -> bool:
        """Whether everything that was started is ready."""
        return all(domain.is_ready for domain in self._domains())

    def _change(self, wanted: Wanted) -> None:
        """Do what a frontend wants."""
        if isinstance(wanted, SetServerState):
            self._set_state(wanted.state)
        elif isinstance(wanted, RestartEngines):
            self.restart_engines()
        elif self._trials.want(wanted):
            self._publish()

    def restart_engines(self) -> None:
        """Restart all engines, one after the other; those that are down are left to their own restart."""
        if self._to_restart or self._phase is not _Phase.SERVING:
            return
        self._to_restart.extend(self._engines)
        get_logger().warning("an administrator restarts all engines, one after the other")
        self._publish()

    def _set_state(self, state: ServerState) -> None:
        get_logger().warning("an administrator has set: %s", state)
        set_log_level(state.log_level)
        self._server_state = state
        self._publish()

    def _publish(self) -> None:
        if self._control is not None:
            self._control.publish(self._engine_state())
        if self._links is not None:
            self._links.publish(self._engine_state())

    # End

    @property
    def has_frontends(self) -> bool:
        """Whether a frontend has not ended."""
        return any(frontend.is_alive for frontend in self._frontends)

    def end_engines(self, cause: str) -> None:
        """End all engines. A running core first sends `cause` to its frontends."""
        self._stop_restarting()
        for group in self._engines:
            group.end(Failure(cause, cause))
        self._publish()

    @property
    def next_life(self) -> int:
        """`first_life` of a server that replaces this one."""
        return self._first_life + 1 + max((frontend.number for frontend in self._frontends), default=0)

    def leave(self) -> None:
        """Accept no further connections: another server has the sockets. Those that are open are served.

        An engine that ends is started again for them, a frontend is not.
        """
        self._is_leaving = True
        self._phase = _Phase.STOPPING
        for frontend in self._frontends:
            frontend.stay_down()
            frontend.leave()
        self._publish()

    def come_back(self) -> None:
        """Accept connections again, after `leave`: the server that had the sockets has died."""
        self._is_leaving = False
        self._phase = _Phase.SERVING
        for frontend in self._frontends:
            frontend.come_back()
        self._publish()

    def drain_frontends(self, timeout_s: float, ends: Callable[[], bool]) -> None:
        """Wait until the frontends, which end by themselves, have ended, or `ends()` is true."""
        deadline = time.monotonic() + timeout_s
        while self.has_frontends and time.monotonic() < deadline and not ends():
            self.check()

    def take_streams(self) -> Iterator[Claimed]:
        """After the end of the frontends: all streams that clients may resume. The engines forget them."""
        yield from self.handed.take_all()
        yield from self._left.take_all()
        for group in self._engines:
            if group.is_ready:
                for address in group.addresses:
                    yield from take_streams(self._context, address.endpoint)

    def stop_frontends(self, timeout_s: float, hurry: Callable[[], bool]) -> None:
        """Stop the frontends after their running requests, at most `timeout_s`, or once `hurry()` is true.

        After `leave` they end by themselves, after their connections. `fault` says then why requests were cut
        off, if any were. A request that is told that the server stops is not.
        """
        if not self._is_leaving:
            self._stop_restarting()
            for frontend in self._frontends:
                frontend.terminate()
        self.drain_frontends(timeout_s, hurry)
        for frontend in self._frontends:
            frontend.interrupt()
        deadline = time.monotonic() + _CLIENT_ERRORS_S
        while self.has_frontends and time.monotonic() < deadline:
            self._receive(_END_POLL_S)  # streams that they leave
        for frontend in self._frontends:
            if reason := frontend.unclean_end():
                failed = Failure(reason, f"{frontend.label}: {reason}")
                self.fault = self.fault or self._last_engine_failure or failed
            frontend.close()

    def _stop_restarting(self) -> None:
        self._phase = _Phase.STOPPING
        if self._links is not None:
            self._links.stop_waiting_for_leavers()
        for domain in self._domains():
            domain.stay_down()
        self._publish()

    def close(self) -> None:
        """Stop every child, with SIGKILL where SIGTERM was not enough, and remove the run directory.

        The other nodes end, with status 1 if `failure` is set. May be called twice.
        """
        for frontend in self._frontends:
            frontend.close()
        lives = [group.life for group in self._engines if group.life is not None]
        for life in lives:
            life.terminate()
        # A core sends Shutdown to its workers, but only once it is ready.
        deadline = time.monotonic() + ENGINE_STOP_S
        for life in lives:
            if life.is_ready:
                life.wait(deadline - time.monotonic())
                if late := [child.name for child in life.children.values() if child.is_alive]:
                    get_logger().warning(
                        "not ended within %.0f s, and killed: %s", ENGINE_STOP_S, ", ".join(late)
                    )
        for group in self._engines:
            group.close()
        if self._preparation is not None:
            self._preparation.close()
            self._preparation = None
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._links is not None:
            self._links.close(self.failure, ExitStatus.FAILURE if self.failure else ExitStatus.DONE)
        if self._ports is not None:
            self._ports.close()
        self._context.destroy(linger=0)
        self._directory.close()

    def pids(self) -> dict[str, int]:
        """Process ids of the children, by name."""
        lives = [domain.life for domain in self._domains() if domain.life is not None]
        return {child.name: child.process.pid for life in lives for child in life.children.values()}
