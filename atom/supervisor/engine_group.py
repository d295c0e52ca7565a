"""Engines that share collectives: the cores and the tensor-parallel workers of data-parallel ranks.

Engines that share nothing have a group each. Those that share experts are one group, since a rank that
ends leaves the others in a collective: their workers are the ranks of one mesh.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import zmq

from atom.config.engine import EngineConfig
from atom.messages.codec import encode
from atom.messages.launch import CoreLaunch, EngineAddress, Rendezvous, WorkerLaunch
from atom.messages.supervisor import EngineEnded
from atom.messages.worker import WorkerFailed
from atom.supervisor.child import wait_for
from atom.supervisor.domain import Domain, Setup
from atom.supervisor.failure import Failure
from atom.supervisor.life import Life
from atom.utils.rendezvous import open_rendezvous

# Time for the cores to send their frontends the cause.
_NOTIFY_S = 1.0


class EngineGroup(Domain):
    """The engines of `ranks`. The KV cache of each has the same size in all lives."""

    def __init__(self, ranks: Sequence[int], setup: Setup, hash_seed: int):
        """`hash_seed` is that of the prefix caches of all engines."""
        self._ranks = ranks
        self._hash_seed = hash_seed
        self._num_blocks: dict[int, list[int]] = {}
        self._is_only_engine = setup.config.parallel.data_parallel_size == 1
        super().__init__(self._name(), setup)

    def _name(self) -> str:
        if self._is_only_engine:
            return "engine"
        first, last = self._ranks[0], self._ranks[-1]
        return f"engine {first}" if first == last else f"engines {first} to {last}"

    def _child(self, rank: int, name: str) -> str:
        """The name of a process of this engine."""
        return name if self._is_only_engine else f"engine {rank} {name}"

    def _core(self, rank: int) -> str:
        return self._child(rank, "core")

    def _socket(self, life: Life, rank: int, name: str) -> str:
        """The socket called `name` of an engine."""
        return life.endpoint(name if len(self._ranks) == 1 else f"{name}-{rank}")

    @property
    def addresses(self) -> list[EngineAddress]:
        """Where frontends reach the present life; empty while there is none."""
        if self.life is None:
            return []
        return [
            EngineAddress(rank, self.number, self._socket(self.life, rank, "core")) for rank in self._ranks
        ]

    @property
    def ended(self) -> list[EngineEnded]:
        """The last ended life of each engine."""
        if self.last_failure is None:
            return []
        number = self.number if self.life is None else self.number - 1
        return [EngineEnded(rank, number, self.last_failure.text) for rank in self._ranks]

    def _open(self, number: int) -> Life:
        setup = self._setup
        name = f"engine-{self._ranks[0]}" if len(self._ranks) == 1 else "engines"
        return Life(
            setup.context,
            setup.run_dir / f"{name}.{number}",
            setup.config.reliability.hang_timeout,
            setup.on_progress if (self._ranks[0], number) == (0, 0) else lambda progress: None,
            num_ready=len(self._ranks),
        )

    def _launch(self, life: Life) -> None:
        ranks = self._setup.config.parallel.tensor_parallel_size
        for rank in self._ranks:
            self._launch_core(life, rank)
        with open_rendezvous(len(self._ranks) * ranks, self.number) as places:
            for index, place in enumerate(places):
                self._launch_worker(life, (self._ranks[index // ranks], index % ranks), place)

    def _launch_core(self, life: Life, rank: int) -> None:
        launch = CoreLaunch(
            self._with_own_traces(rank),
            self._setup.checkpoint,
            self._socket(life, rank, "core"),
            self._socket(life, rank, "workers"),
            life.endpoint("supervisor"),
            self._hash_seed,
            self._core(rank),
            self._num_blocks.get(rank, []),
            rank,
        )
        life.spawn(self._core(rank), "engine_core.process", launch)

    def _launch_worker(self, life: Life, ranks: tuple[int, int], place: Rendezvous | None) -> None:
        """Start a worker, given the ranks of its engine and within it."""
        engine, rank = ranks
        parallel = self._setup.config.parallel
        lockstep = range(parallel.num_workers) if len(self._ranks) > 1 else range(0)
        name = self._child(engine, f"worker {rank}")
        launch = WorkerLaunch(
            self._with_own_traces(engine),
            self._setup.checkpoint,
            rank,
            self._socket(life, engine, "workers"),
            life.endpoint("supervisor"),
            place,
            device_index=engine * parallel.tensor_parallel_size + rank,
            label=name,
            data_parallel_rank=engine,
            waves=[life.endpoint(f"wave-{each}") for each in lockstep],
        )
        life.spawn(name, "workers.main", launch, place.pass_fds if place else ())

    def _with_own_traces(self, rank: int) -> EngineConfig:
        """The configuration, with a directory for traces that neither engines nor lives share."""
        config = self._setup.config
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
        """As of every domain; also keeps the sizes of the KV caches for later lives."""
        if self.life is not None:
            reports = self.life.reports
            found = {rank: reports.get(self._core(rank)) for rank in self._ranks}
            self._num_blocks |= {rank: ready.num_blocks for rank, ready in found.items() if ready is not None}
        return super().failure()

    def _farewell(self, life: Life, failure: Failure) -> None:
        """Let running cores send `failure` to their frontends before they are killed.

        The core of a dead worker gets the WorkerFailed that this one could not send; others get SIGTERM.
        """
        cores = [(rank, life.children.get(self._core(rank))) for rank in self._ranks]
        running = [(rank, core) for rank, core in cores if core is not None and core.is_alive]
        for rank, core in running:
            worker = failure.process.removeprefix(self._child(rank, "worker "))
            if worker.isdigit():
                self._report_dead_worker(self._socket(life, rank, "workers"), int(worker), failure.reason)
            else:
                core.terminate()
        wait_for([core for _, core in running], _NOTIFY_S)

    def _report_dead_worker(self, endpoint: str, worker: int, reason: str) -> None:
        with self._setup.context.socket(zmq.DEALER) as workers:
            workers.setsockopt(zmq.LINGER, int(_NOTIFY_S * 1000))
            workers.connect(endpoint)
            workers.send(encode(WorkerFailed(worker, reason)), zmq.DONTWAIT)
