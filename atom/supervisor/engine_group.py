"""Engines that share collectives: the cores and the tensor-parallel workers of data-parallel ranks.

Engines that share nothing have a group each. Engines that share experts are one group: their workers are the
ranks of one mesh, and a rank that ends would leave the others in a collective.
"""

import time
from dataclasses import replace
from pathlib import Path

from atom.shared.config.engine import EngineConfig
from atom.shared.messages.codec import encode
from atom.shared.messages.launch import CoreLaunch, EngineAddress, Rendezvous, WorkerLaunch
from atom.shared.messages.supervisor import EngineEnded
from atom.shared.messages.worker import WorkerFailed
from atom.shared.utils.endpoint import endpoint_key, tcp_endpoint
from atom.shared.utils.logger import get_logger
from atom.supervisor.child import wait_for
from atom.supervisor.domain import Domain, DomainSettings
from atom.supervisor.failure import Failure
from atom.supervisor.life import Life
from atom.supervisor.process import ProcessSpec, Role

# Time for the cores to send their frontends the cause.
_NOTIFY_S = 1.0


class EngineGroup(Domain):
    """The engines of `ranks`. The KV cache of an engine has the same size in all its lives."""

    def __init__(self, ranks: range, settings: DomainSettings, hash_seed: int):
        """`hash_seed` is that of the prefix caches of all engines."""
        self._ranks = ranks
        self._hash_seed = hash_seed
        self._num_blocks: dict[int, list[int]] = {}
        self._leaving = ""  # why its present life is about to end, while no request reaches it
        self._is_only_engine = settings.config.parallel.data_parallel_size == 1
        super().__init__(self._name(), settings, settings.placement.nodes_of(ranks))

    def _name(self) -> str:
        if self._is_only_engine:
            return "engine"
        first = self._ranks[0]
        last = self._ranks[-1]
        return f"engine {first}" if first == last else f"engines {first} to {last}"

    def _child(self, rank: int, name: str) -> str:
        """The name of a process of this engine."""
        return name if self._is_only_engine else f"engine {rank} {name}"

    def _core(self, rank: int) -> str:
        return self._child(rank, "core")

    def _socket(self, life: Life, rank: int, name: str, binds: bool = False) -> str:
        """The socket called `name` of an engine's core, for one that connects or for the core itself."""
        local = name if len(self._ranks) == 1 else f"{name}-{rank}"
        return self._endpoint(life, f"{name}-{rank}", local, self._settings.placement.node_of(rank), binds)

    def _wave(self, life: Life, rank: int, worker: int, binds: bool = False) -> str:
        """The socket of a worker for WaveStart."""
        name = f"wave-{self._settings.config.parallel.world_rank(rank, worker)}"
        return self._endpoint(life, name, name, self._settings.placement.node_of(rank, worker), binds)

    def _endpoint(self, life: Life, port_name: str, local_name: str, node: int, binds: bool) -> str:
        """The socket at a port of the node if it has one of that name, else the local one."""
        settings = self._settings
        port = settings.nodes[node].info.ports.get(port_name)
        if port is None:
            return settings.nodes[node].endpoint(life.name, local_name)
        key = endpoint_key(settings.secret, f"{settings.local.run_dir} {port_name} {self.number}")
        return tcp_endpoint(key, port.address, port.port, port.fd if binds else None)

    @property
    def addresses(self) -> list[EngineAddress]:
        """Where frontends reach the current life; empty while there is none."""
        if self.life is None or self._leaving:
            return []
        return [
            EngineAddress(rank, self.number, self._socket(self.life, rank, "core")) for rank in self._ranks
        ]

    @property
    def ended(self) -> list[EngineEnded]:
        """How the latest life that has ended did, for each engine."""
        if self._leaving:
            return [EngineEnded(rank, self.number, self._leaving, False, True) for rank in self._ranks]
        if self.last_failure is None:
            return []
        number = self.number if self.life is None else self.number - 1
        text = self.last_failure.text
        return [EngineEnded(rank, number, text, self.is_over, self.is_planned) for rank in self._ranks]

    def leave(self, reason: str) -> None:
        """Announce that the current life ends without a failure: frontends send its requests elsewhere."""
        self._leaving = reason

    def restart_now(self) -> None:
        """After `leave`: end the current life, and plan the next one at once."""
        reason = self._leaving
        self._leaving = ""
        self.end(Failure(reason, reason))
        self.is_planned = True
        self._start_at = time.monotonic()
        get_logger().info("%s, life %d, has ended: %s", self.name, self.number, reason)

    @property
    def ranks(self) -> list[int]:
        """Data-parallel ranks of its engines."""
        return list(self._ranks)

    def _open(self, number: int) -> Life:
        settings = self._settings
        name = f"engine-{self._ranks[0]}" if len(self._ranks) == 1 else "engines"
        return Life(
            settings.context,
            Path(settings.local.run_dir, f"{name}.{number}"),
            settings.config.reliability.hang_timeout,
            settings.on_progress if (self._ranks[0], number) == (0, 0) else lambda progress: None,
            num_ready=len(self._ranks),
        )

    def _launch(self, life: Life) -> None:
        for rank in self._ranks:
            self._launch_core(life, rank)
        for rank in self._ranks:
            for worker in range(self._settings.config.parallel.tensor_parallel_size):
                self._launch_worker(life, rank, worker)

    def _launch_core(self, life: Life, rank: int) -> None:
        node = self._settings.nodes[self._settings.placement.node_of(rank)]
        ports = [node.info.ports.get(f"{name}-{rank}") for name in ("core", "workers")]
        launch = CoreLaunch(
            self._with_own_traces(node.info.config, rank),
            node.info.checkpoint,
            self._socket(life, rank, "core", binds=True),
            self._socket(life, rank, "workers", binds=True),
            node.endpoint(life.name, "supervisor"),
            self._hash_seed,
            self._core(rank),
            self._num_blocks.get(rank, []),
            rank,
            self._describes(rank),
        )
        fds = [port.fd for port in ports if port is not None]
        life.spawn(node, ProcessSpec(self._core(rank), Role.CORE, launch, fds, engine=rank))

    def _launch_worker(self, life: Life, rank: int, worker: int) -> None:
        """Start worker `worker` of the engine of `rank`."""
        settings = self._settings
        parallel = settings.config.parallel
        node = settings.nodes[settings.placement.node_of(rank, worker)]
        rendezvous = self._rendezvous(rank, worker)
        wave = node.info.ports.get(f"wave-{parallel.world_rank(rank, worker)}")
        name = self._child(rank, f"worker {worker}")
        launch = WorkerLaunch(
            self._with_own_traces(node.info.config, rank),
            node.info.checkpoint,
            worker,
            self._socket(life, rank, "workers"),
            node.endpoint(life.name, "supervisor"),
            rendezvous,
            device_index=node.info.first_device + settings.placement.device_of(rank, worker),
            label=name,
            data_parallel_rank=rank,
            waves=self._waves(life, rank, worker),
            describes=self._describes(rank),
        )
        fds = [] if rendezvous is None else list(rendezvous.pass_fds)
        fds += [] if wave is None else [wave.fd]
        life.spawn(node, ProcessSpec(name, Role.WORKER, launch, fds, engine=rank, worker=worker))

    def _describes(self, rank: int) -> bool:
        return rank == 0 and self.number == 0

    def _waves(self, life: Life, rank: int, worker: int) -> list[str]:
        """The sockets of all workers in lockstep, for this worker, which binds its own."""
        if len(self._ranks) == 1:
            return []
        workers = range(self._settings.config.parallel.tensor_parallel_size)
        return [
            self._wave(life, other, each, binds=(other, each) == (rank, worker))
            for other in self._ranks
            for each in workers
        ]

    def _rendezvous(self, rank: int, worker: int) -> Rendezvous | None:
        """Where this worker meets the others: at a port of the first one's node."""
        settings = self._settings
        first = self._ranks[0]
        port = settings.nodes[settings.placement.node_of(first)].info.ports.get(f"store-{first}")
        if port is None:
            return None
        is_spread = len(settings.placement.nodes_of(self._ranks)) > 1
        interface = (
            settings.nodes[settings.placement.node_of(rank, worker)].info.interface if is_spread else "lo"
        )
        hosts = (rank, worker) == (first, 0)
        return Rendezvous(port.address, port.port, self.number, interface, port.fd if hosts else None)

    def _with_own_traces(self, config: EngineConfig, rank: int) -> EngineConfig:
        """`config`, with directories for traces that belong to this engine and this life alone."""
        parts = [] if self._is_only_engine else [f"engine-{rank}"]
        parts += [f"life-{self.number}"] if self.number else []

        def own(directory: str | None) -> str | None:
            return None if directory is None else str(Path(directory, *parts))

        shared = config.observability
        traces = replace(
            shared, step_trace=own(shared.step_trace), torch_profiler_dir=own(shared.torch_profiler_dir)
        )
        return replace(config, observability=traces)

    def failure(self) -> Failure | None:
        """As the base class; also keeps the sizes of the KV caches for later lives."""
        if self.life is not None:
            reports = self.life.reports
            found = {rank: reports.get(self._core(rank)) for rank in self._ranks}
            self._num_blocks |= {rank: ready.num_blocks for rank, ready in found.items() if ready is not None}
        return super().failure()

    def _send_exit_reason(self, life: Life, failure: Failure) -> None:
        """Let running cores send `failure` to their frontends before they are killed.

        The core of a dead worker gets the WorkerFailed that the worker could not send, another core SIGTERM.
        """
        cores = [(rank, life.children.get(self._core(rank))) for rank in self._ranks]
        running = [(rank, core) for rank, core in cores if core is not None and core.is_alive]
        dead = failure.child
        for rank, core in running:
            if dead is not None and dead.role is Role.WORKER and dead.engine == rank:
                self._report_dead_worker(life, rank, WorkerFailed(dead.worker, failure.reason))
            else:
                core.terminate()
        wait_for([core for _, core in running], _NOTIFY_S)

    def _report_dead_worker(self, life: Life, rank: int, message: WorkerFailed) -> None:
        """Send `message` in place of the dead worker, from the node of the core."""
        node = self._settings.nodes[self._settings.placement.node_of(rank)]
        node.deliver(self._socket(life, rank, "workers"), encode(message))
