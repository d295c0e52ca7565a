"""The engine of one data-parallel rank: an engine core and its tensor-parallel workers."""

from dataclasses import replace
from pathlib import Path

import zmq

from atom.config.engine import EngineConfig
from atom.messages.codec import encode
from atom.messages.launch import CoreLaunch, EngineAddress, WorkerLaunch
from atom.messages.supervisor import EngineEnded
from atom.messages.worker import WorkerFailed
from atom.supervisor.child import wait_for
from atom.supervisor.domain import Domain, Setup
from atom.supervisor.failure import Failure
from atom.supervisor.life import Life
from atom.utils.rendezvous import open_rendezvous

# Time for a core to send its frontends the cause.
_NOTIFY_S = 1.0
_CORE = "core"


class EngineGroup(Domain):
    """One engine, whose KV cache has the same size in all its lives."""

    def __init__(self, rank: int, setup: Setup, hash_seed: int):
        """`hash_seed` is that of the prefix caches of all engines."""
        self._rank = rank
        self._hash_seed = hash_seed
        self._num_blocks: list[int] = []
        engines = setup.config.parallel.data_parallel_size
        name = "engine" if engines == 1 else f"engine {rank}"
        self._prefix = "" if engines == 1 else f"{name} "
        super().__init__(name, setup)

    @property
    def address(self) -> EngineAddress | None:
        """Where frontends reach the present life."""
        if self.life is None:
            return None
        return EngineAddress(self._rank, self.number, self.life.endpoint(_CORE))

    @property
    def ended(self) -> EngineEnded | None:
        """The last ended life."""
        if self.last_failure is None:
            return None
        number = self.number if self.life is None else self.number - 1
        return EngineEnded(self._rank, number, self.last_failure.text)

    def _open(self, number: int) -> Life:
        setup = self._setup
        return Life(
            setup.context,
            setup.run_dir / f"engine-{self._rank}.{number}",
            setup.config.reliability.hang_timeout,
            setup.on_progress if (self._rank, number) == (0, 0) else lambda progress: None,
        )

    def _launch(self, life: Life) -> None:
        config = self._with_own_traces()
        core = CoreLaunch(
            config,
            self._setup.checkpoint,
            life.endpoint(_CORE),
            life.endpoint("workers"),
            life.endpoint("supervisor"),
            self._hash_seed,
            self._prefix + _CORE,
            self._num_blocks,
        )
        life.spawn((_CORE, self._prefix + _CORE), "engine_core.process", core)
        ranks = config.parallel.tensor_parallel_size
        with open_rendezvous(ranks, self.number) as places:
            for rank, place in enumerate(places):
                name = f"worker {rank}"
                launch = WorkerLaunch(
                    config,
                    self._setup.checkpoint,
                    rank,
                    life.endpoint("workers"),
                    life.endpoint("supervisor"),
                    place,
                    device_index=self._rank * ranks + rank,
                    label=self._prefix + name,
                )
                inherited = place.pass_fds if place else ()
                life.spawn((name, self._prefix + name), "workers.main", launch, inherited)

    def _with_own_traces(self) -> EngineConfig:
        """The configuration, with a directory for traces that neither ranks nor lives share."""
        config = self._setup.config
        parts = [f"engine-{self._rank}"] if self._prefix else []
        parts += [f"life-{self.number}"] if self.number else []

        def own(directory: str | None) -> str | None:
            return None if directory is None else str(Path(directory, *parts))

        shared = config.observability
        traces = replace(
            shared, step_trace=own(shared.step_trace), torch_profiler_dir=own(shared.torch_profiler_dir)
        )
        return replace(config, observability=traces)

    def failure(self) -> Failure | None:
        """As of every domain; also keeps the size of the KV cache for later lives."""
        if self.life is not None and self.life.reported is not None:
            self._num_blocks = self.life.reported.num_blocks
        return super().failure()

    def _farewell(self, life: Life, failure: Failure) -> None:
        """Let a running core send `failure` to its frontends before it is killed.

        It gets the WorkerFailed that a dead worker could not send; without a dead worker, SIGTERM.
        """
        core = life.children.get(_CORE)
        if core is None or not core.is_alive:
            return
        rank = failure.process.removeprefix("worker ")
        if rank.isdigit():
            with self._setup.context.socket(zmq.DEALER) as workers:
                workers.setsockopt(zmq.LINGER, int(_NOTIFY_S * 1000))
                workers.connect(life.endpoint("workers"))
                workers.send(encode(WorkerFailed(int(rank), failure.reason)), zmq.DONTWAIT)
        else:
            core.terminate()
        wait_for([core], _NOTIFY_S)
