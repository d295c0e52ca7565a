"""One run of the server: command line, start, banner, signals, exit status."""

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import zmq

from atom.commands.plan import show_plan
from atom.engine.banner import banner
from atom.engine.end_signals import EndSignals
from atom.engine.engine_host import EngineHost, Prepare
from atom.engine.replay_file import replay_file
from atom.engine.upgrade import UPGRADE_SIGNAL, HandOver, Successor, TakeOver, settings_of_sockets
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.cli import (
    COMMON_FLAGS,
    CommandLineParser,
    ConfigError,
    add_engine_args,
    add_nodes_args,
    add_program_args,
    add_server_args,
    all_fields,
    engine_config_from,
    explicit_fields,
    nodes_config_from,
    notes_of,
    server_config_from,
    with_http_port,
    with_launcher,
    with_sources,
)
from atom.shared.config.engine import EngineConfig
from atom.shared.config.generation import generation_overrides
from atom.shared.config.nodes import NodesConfig, first_device
from atom.shared.config.server import ServerConfig
from atom.shared.config.sources import unknown_variables
from atom.shared.messages.admin import ServerState
from atom.shared.messages.nodes import NodeInfo
from atom.shared.messages.supervisor import Progress
from atom.shared.utils import envs
from atom.shared.utils.errors import out_of_memory
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.logger import print_lines, setup_logging
from atom.shared.utils.net import AdminSocket, ListenPort
from atom.shared.utils.open_files import raise_open_files_limit
from atom.shared.utils.run_directory import RunDirectory
from atom.shared.utils.service_manager import ServiceManager
from atom.shared.utils.version import atom_version
from atom.supervisor import (
    NodeAgent,
    NodePlacement,
    NodePorts,
    Placement,
    StartError,
    Supervisor,
    find_node_placement,
    prepared,
)
from atom.supervisor.handover import HandoverError, OldServer
from atom.supervisor.identity import difference, identity_of, model_identity
from atom.supervisor.progress import ProgressBars
from frontend.http.auth import ApiKeys
from frontend.http.cors import CorsPolicy
from frontend.http.tls import tls_context
from frontend.metrics.tracing import check_installed

# Time beyond the frontend's own deadline before it is killed.
_STOP_MARGIN_S = 5.0
# The longest that the end takes beyond `--shutdown-timeout`; docs/operate/operations.md, "Shutdown".
END_S = 20.0
# After the engine's death the frontend responds with 503 for this long, for load balancers to notice.
ENGINE_DEATH_HOLD_S = 3.0
_HOLD_POLL_S = 0.05
_LAST_MESSAGES_MS = 1000


class Launcher:
    """One run of the server, from the command line to the exit status."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        nodes: NodesConfig,
        explicit: set[str],
        notes: Sequence[str] = (),
    ):
        """`explicit` names the settings that the user gave; `notes` are log lines about the command line."""
        self.config = config
        self.server = server
        self.nodes = nodes
        self.explicit = explicit
        self.started = time.monotonic()
        self._host = EngineHost(config, explicit)
        self._logger = setup_logging("launch", config.observability.log_level)
        for note in notes:
            self._logger.info(note)
        self._bars = ProgressBars()
        self._signals = EndSignals(ExitStatus.DONE)
        self._is_starting = True
        self._phase = "preparing the model"
        self._manager = ServiceManager()
        self._model: dict[str, str] = {}
        self._wants_successor = False
        self._successor: Successor | None = None
        self._take_over: TakeOver | None = None

    def run(self) -> None:
        """Serve until a signal. Raises StartError, ConfigError or OSError."""
        with self._signals:
            signal.signal(UPGRADE_SIGNAL, self._on_upgrade_signal)
            try:
                self._run()
            finally:
                self._manager.close()
                signal.signal(UPGRADE_SIGNAL, signal.SIG_IGN)  # as EndSignals ignores its own

    def _check_server(self) -> str | None:
        """Raises ValueError for unusable settings; returns the path of --chat-template."""
        template = _template_file(self.server.chat_template)
        ApiKeys(self.server.api_key)
        CorsPolicy(self.server)
        tls_context(self.server)
        generation_overrides(self.server.override_generation_config)
        if self.server.otlp_traces_endpoint is not None:
            check_installed()
        return template

    def _prepare(self, prepare: Prepare, node: NodePlacement, template: str | None) -> NodePlacement:
        """Prepare the model and resolve the configuration; returns `node` with its GPUs.

        `template` is the path of --chat-template.
        """
        host = self._host
        host.prepare(prepare)
        self._bars.close()
        if template is not None:
            host.checkpoint = replace(host.checkpoint, chat_template_file=template, tool_template_file=None)
        changed = generation_overrides(self.server.override_generation_config)
        defaults = host.checkpoint.default_sampling | changed
        host.checkpoint = replace(host.checkpoint, default_sampling=defaults)
        host.resolve(self._notes(host.checkpoint))
        self.config = host.config
        if self.config.device.device == "cpu":
            return node
        workers = self.config.parallel.workers_per_node
        device = first_device(self.nodes.local_rank, workers, host.capabilities.cuda)
        return replace(node, first_device=device)

    def _run(self) -> None:
        raise_open_files_limit()
        template = self._check_server()
        old = self._running_server()
        first_life, taken, taken_admin = 0, None, None
        if old is not None:
            self.server = settings_of_sockets(self.server, old.offer, self.explicit)
            first_life, taken, taken_admin = old.offer.next_life, old.sockets, old.admin
        server = self.server
        is_one = self.config.parallel.nnodes == 1
        node = NodePlacement() if is_one else find_node_placement(self.nodes, self._signals.check)
        with (
            node.link or nullcontext(),
            ListenPort(server.host, server.server_port, server.api_server_count, taken=taken) as port,
            _admin_socket(server, taken_admin) as admin,
            Supervisor(self._on_progress, lambda: self._on_turn(supervisor), first_life) as supervisor,
        ):
            take_over = self._take_over = None if old is None else TakeOver(old, supervisor, admin)
            try:
                with self._signals.before_failures():
                    self._start(supervisor, node, port, admin, template, take_over)
            finally:
                self._is_starting = False
            if take_over is not None:
                take_over.started()
            self._print_banner(supervisor, port.port, admin)
            self._manager.ready(f"serving {self.config.model.names[0]} at {self._url(port.port)}")
            declines = "it is a server of several nodes" if self.config.parallel.nnodes > 1 else ""
            try:
                with closing(HandOver(supervisor, port, admin, server, declines)) as hand_over:
                    self._serve(supervisor, take_over, hand_over)
            except StartError as death:
                if take_over is not None:
                    take_over.died()
                self._stop_after_death(supervisor, str(death))
                raise StartError(str(death)) from None  # a running engine that died exits with status 1

    def _running_server(self) -> OldServer | None:
        """The server of --upgrade-from. Raises ConfigError."""
        if self.server.upgrade_from is None:
            return None
        if self.config.parallel.nnodes > 1:
            raise ConfigError(
                "--upgrade-from: a server of several nodes cannot be replaced so; restart its engines one "
                "after the other instead, by POST /restart_engines of its administration"
            )
        try:
            return OldServer(self.server.upgrade_from, self._signals.check)
        except HandoverError as error:
            raise ConfigError(str(error)) from None

    def _serve(self, supervisor: Supervisor, take_over: TakeOver | None, hand_over: HandOver) -> None:
        has_left = False
        while not self._signals.count and not has_left:
            supervisor.check()
            if take_over is not None:
                take_over.receive()
            if take_over is None or take_over.is_done:
                self._start_successor()
                if (model := hand_over.wanted()) is not None:
                    has_left = self._hand_over(supervisor, hand_over, model)
        if not has_left:
            if take_over is not None:
                take_over.stopping()
            self._logger.info("stopping: running requests may finish")
            if self._successor is not None:
                self._successor.stop()
            self._manager.stopping(self.server.shutdown_timeout + END_S)
            timeout = self.server.shutdown_timeout + _STOP_MARGIN_S
            supervisor.stop_frontends(timeout, hurry=lambda: self._signals.count > 1)
            if self._successor is not None:
                self._successor.close()
        if supervisor.fault is not None:
            raise StartError(supervisor.fault.text)

    def _start_successor(self) -> None:
        """After UPGRADE_SIGNAL, start a server that replaces this one."""
        if self._successor is not None and self._successor.has_failed():
            self._successor = None
        if self._wants_successor and self._successor is None:
            self._successor = Successor(self._manager.environment)
        self._wants_successor = False

    def _hand_over(self, supervisor: Supervisor, hand_over: HandOver, model: dict[str, str]) -> bool:
        """End after the requests of this server: a new one, with `model`, accepts connections now.

        Returns False if that has died meanwhile, and this server accepts them again.
        """
        self._logger.info("process %d has taken over: running requests may finish", hand_over.new_pid)
        if supervisor.engine_state.state != ServerState(self.config.observability.log_level):
            self._logger.warning("what an administrator has set ends with this server, draining included")
        self._manager.replaced_by(hand_over.new_pid)
        hand_over.leave(difference("the new server", model, "the earlier one", self._model))
        timeout = self.server.shutdown_timeout + _STOP_MARGIN_S
        supervisor.drain_frontends(timeout, lambda: self._signals.count > 0 or hand_over.has_lost_new())
        if not self._signals.count and hand_over.has_lost_new():
            self._logger.error(
                "process %d has died: this server accepts connections again; streams that it had are lost",
                hand_over.new_pid,
            )
            hand_over.come_back()
            return False
        supervisor.stop_frontends(0.0, hurry=lambda: True)
        hand_over.send_streams()
        return True

    def _stop_after_death(self, supervisor: Supervisor, cause: str) -> None:
        """Stop what is left without an engine or a frontend; frontends first send their clients errors."""
        self._logger.error("%s: ending", cause)
        self._manager.stopping(ENGINE_DEATH_HOLD_S + END_S)
        supervisor.end_engines(cause)
        signals, before = self._signals, self._signals.count
        deadline = time.monotonic() + ENGINE_DEATH_HOLD_S
        while supervisor.has_frontends and signals.count == before and time.monotonic() < deadline:
            time.sleep(_HOLD_POLL_S)
        supervisor.stop_frontends(_STOP_MARGIN_S, hurry=lambda: signals.count > before)

    def _start(
        self,
        supervisor: Supervisor,
        node: NodePlacement,
        port: ListenPort,
        admin: AdminSocket | None,
        template: str | None,
        take_over: TakeOver | None,
    ) -> None:
        node = self._prepare(supervisor.prepare, node, template)
        self._model = model_identity(self.config, self._host.checkpoint)
        supervisor.gather_nodes(self.config, self._host.checkpoint, self.server, node)
        self._host.start(supervisor)
        if take_over is not None:
            supervisor.wait_ready()  # the frontends of both servers accept connections at the same time
        supervisor.start_frontends(port, None if admin is None else admin.socket)
        supervisor.wait_ready()
        supervisor.restart_failed()
        if take_over is not None:
            take_over.finish(self._model)
        self._bars.close()

    def _notes(self, checkpoint: Checkpoint) -> list[str]:
        """NodeSettings without effect that the engine's configuration does not have."""
        notes = []
        if self.config.parallel.nnodes == 1:
            given = [field.name for field in fields(NodesConfig) if field.name in self.explicit]
            flags = [f"--{name.replace('_', '-')}" for name in given]
            notes += [f"{flag} has no effect: there is one node; --nnodes adds more" for flag in flags]
        notes += unknown_variables(all_fields(), os.environ)
        if self.server.chat_template is not None and checkpoint.tokenizer_file is None:
            notes.append("--chat-template has no effect: a checkpoint without a tokenizer serves token ids")
        return notes

    def _print_banner(self, supervisor: Supervisor, port: int, admin: AdminSocket | None) -> None:
        lines = banner(
            self.config,
            self.server,
            self._host.checkpoint,
            supervisor.details,
            self._url(port),
            None if admin is None else admin.address,
            time.monotonic() - self.started,
        )
        print_lines("\n".join(lines))
        if self.server.host in ("0.0.0.0", "::") and self.server.api_key is None:
            self._logger.warning(
                "listening on every interface without a key: use --host 127.0.0.1 to stay local, or --api-key"
            )

    def _url(self, port: int) -> str:
        scheme = "http" if self.server.ssl_certfile is None else "https"
        return f"{scheme}://{_reachable(self.server.host)}:{port}"

    def _on_progress(self, progress: Progress) -> None:
        self._bars.update(progress)
        self._phase = f"{progress.phase}, {progress.done} of {progress.total}"

    def _on_turn(self, supervisor: Supervisor) -> None:
        """End the start after a signal; tell the service manager that it goes on, or that engines work."""
        if self._is_starting:
            self._signals.check()
            self._manager.starting(self._phase)
            if self._take_over is not None:
                self._take_over.starting()
        elif supervisor.is_working:
            self._manager.alive()

    def _on_upgrade_signal(self, *_: object) -> None:
        self._wants_successor = True


class NodeLauncher(Launcher):
    """One run of a node other than 0, which takes part in a server that node 0 serves."""

    _is_joining = True

    def _run(self) -> None:
        raise_open_files_limit()
        template = self._check_server() if self.nodes.frontend_per_node else None
        node = find_node_placement(self.nodes, self._signals.check)
        with ExitStack() as open_things:
            run_dir = open_things.enter_context(closing(RunDirectory())).path
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            open_things.callback(context.destroy, linger=_LAST_MESSAGES_MS)
            http = None
            admin = None
            if self.nodes.frontend_per_node:
                server = self.server
                http = ListenPort(server.host, server.server_port, server.api_server_count)
                open_things.enter_context(http)
                admin = open_things.enter_context(_admin_socket(server))
                self._logger.info("serving HTTP on %s port %d once engines are ready", server.host, http.port)
            on_turn = partial(self._on_node_turn, False)
            prepare = partial(prepared, context, run_dir, on_progress=self._on_progress, on_turn=on_turn)
            with self._signals.before_failures():
                node = self._prepare(prepare, node, template)
            placement = Placement(self.config.parallel, self.nodes.frontend_per_node)
            ports = open_things.enter_context(
                closing(NodePorts(placement, node.rank, node.address, self.config.parallel.port))
            )
            info = NodeInfo(
                node.rank,
                node.address,
                node.interface,
                str(run_dir),
                self.config,
                self._host.checkpoint,
                self.server,
                ports.ports,
                node.first_device,
            )
            identity = identity_of(self.config, self._host.checkpoint, self.server if http else None)
            agent = NodeAgent(context, info, node, identity, http, None if admin is None else admin.socket)
            self._is_starting = False
            self._phase = f"joining the master at {node.master}"
            drain_s = self.server.shutdown_timeout + _STOP_MARGIN_S
            agent.run(lambda: self._signals.count, drain_s, self._on_node_turn)

    def _on_upgrade_signal(self, *_: object) -> None:
        self._logger.error("a node of a server of several is not replaced: POST /restart_engines at node 0")

    def _on_node_turn(self, has_joined: bool) -> None:
        """Tell the service manager that the start goes on, that it is over, or that this node lives.

        A signal ends the start; the agent itself notices a later one.
        """
        if self._is_starting:
            self._signals.check()
        if self._is_joining and not has_joined:
            self._manager.starting(self._phase)
        elif self._is_joining:
            self._is_joining = False
            self._manager.ready(f"node {self.nodes.node_rank} has joined {self.nodes.master_addr}")
        elif self._signals.count:
            self._manager.stopping(self.server.shutdown_timeout + END_S)
        else:
            self._manager.alive()


def run() -> int:
    """Serve with the options of the command line; returns the exit status."""
    parser = CommandLineParser(
        COMMON_FLAGS,
        prog="atom-launch",
        usage="atom-launch [MODEL] [FLAG]...",
        description="Serve a model over the APIs of OpenAI and Anthropic.",
    )
    add_engine_args(parser)
    add_server_args(parser)
    add_nodes_args(parser)
    parser.add_argument(
        "--version", action="version", version=f"ATOM {atom_version()}", help="Print the version and exit."
    )
    add_program_args(parser)
    args = parser.parse_args()
    try:
        args = with_http_port(with_launcher(with_sources(args)))
        config = engine_config_from(args)
        server = server_config_from(args)
        explicit = explicit_fields(args)
        nodes = nodes_config_from(args)
        if args.plan is not None:
            return _until_signal(partial(show_plan, config, explicit, args.plan, args.json))
        if args.json:
            raise ConfigError("--json needs --plan")
        if args.replay_file is not None:
            return _until_signal(partial(replay_file, args.replay_file, config, explicit))
        nodes.check(config.parallel.nnodes)
        kind = NodeLauncher if nodes.node_rank else Launcher
        kind(config, server, nodes, explicit, notes_of(args)).run()
    except (StartError, ValueError, OSError, MemoryError) as error:
        if envs.ATOM_LOG_MORE:
            traceback.print_exc()
        text = str(error) if isinstance(error, StartError) else out_of_memory(error) or str(error)
        print_lines(f"error: {text}")
        return _status_of(error)
    return ExitStatus.DONE


def _until_signal(work: Callable[[Callable[[], None]], int]) -> int:
    """The exit status of `work`; after a signal, what it gets to call ends it, its children first."""
    with EndSignals(second_kills=True) as signals, signals.before_failures():
        return work(signals.check)


def _status_of(error: Exception) -> int:
    """A ValueError is about a setting or a variable, another error about the host."""
    if isinstance(error, StartError):
        return error.status
    return ExitStatus.USAGE if isinstance(error, ValueError) else ExitStatus.RESOURCES


def _template_file(given: str | None) -> str | None:
    """The absolute path of --chat-template; raises ConfigError for an unusable file."""
    if given is None:
        return None
    from frontend.text.chat_template import ChatTemplate

    path = Path(given).expanduser().resolve()
    try:
        ChatTemplate.from_file(path, {})
    except OSError as error:
        raise ConfigError(f"--chat-template {given}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--chat-template {given}: {error}") from None
    return str(path)


def _admin_socket(
    server: ServerConfig, taken: tuple[str, socket.socket] | None = None
) -> AbstractContextManager[AdminSocket | None]:
    """The socket of the administration, if there is one; `taken` is that of a server that this one replaces.

    Raises ConfigError, ListenError.
    """
    if server.admin_port is not None and server.admin_socket is not None:
        raise ConfigError("--admin-port and --admin-socket exclude one another: use one of them")
    if server.admin_port is None and server.admin_socket is None:
        return nullcontext()
    return AdminSocket(server.admin_port, server.admin_socket, taken)


def _reachable(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
