"""The launch message of each kind of child process: one frame on its standard input.

The pipe stays open: its end means that the parent has ended.
"""

import msgspec

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.model import ModelConfig
from atom.shared.config.server import ServerConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.admin import ServerState


class EngineAddress(msgspec.Struct, frozen=True, array_like=True):
    """One life of the engine of a data-parallel rank: from a start of its processes to their end."""

    rank: int
    life: int
    """Counts the starts of this rank's engine, from 0."""
    endpoint: str
    """ZMQ endpoint of its core's frontend socket. It contains rank and life (`engine-1.3/core`), so that no
    message of an earlier life can reach a later one."""


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the ranks that share collectives meet: a torch TCPStore on `address`, hosted by rank 0."""

    address: str
    """IP address that the store listens on. torch's ports know no authentication: a trusted network."""
    port: int
    life: int = 0
    """Counts the starts of these ranks; a worker left over from an earlier life is not let in."""
    interface: str = "lo"
    """Network interface of `address`, for gloo and NCCL."""
    listen_fd: int | None = None
    """The listening socket of that port, inherited by rank 0 alone; None on the others."""

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """What the parent passes on to the worker."""
        return () if self.listen_fd is None else (self.listen_fd,)


class WorkerLaunch(msgspec.Struct, frozen=True):
    """For `python -m workers.main`."""

    config: EngineConfig
    checkpoint: Checkpoint
    rank: int
    """Tensor-parallel rank: the number of the worker within its engine."""
    core: str
    """ZMQ endpoint of the core's worker socket."""
    supervisor: str
    """ZMQ endpoint of the supervisor's socket."""
    rendezvous: Rendezvous | None = None
    """None: one rank, which meets no others."""
    device_index: int = 0
    """The GPU, as an index into this host's visible devices (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES);
    unused on a CPU."""
    label: str = "worker 0"
    """Name in log lines, and in messages to the supervisor."""
    data_parallel_rank: int = 0
    """Rank of the engine among the data-parallel ranks."""
    waves: list[str] = []
    """ZMQ endpoints for `WaveStart` of every worker of engines in lockstep, by rank; else empty."""
    describes: bool = True
    """Whether it logs what it has: the first engine does in its first life, and the others are like it."""


class CoreLaunch(msgspec.Struct, frozen=True):
    """For `python -m engine_core.process`."""

    config: EngineConfig
    checkpoint: Checkpoint
    frontends: str
    """ZMQ endpoint to bind for frontends."""
    workers: str
    """ZMQ endpoint to bind for workers."""
    supervisor: str
    hash_seed: int
    """Unsigned 64 bit; seeds the block hashes of the prefix cache, alike in all engines."""
    label: str = "core"
    """Name in log lines, and in messages to the supervisor."""
    num_blocks: list[int] = []
    """KV blocks of each group in an earlier life of the engine, to have as many again; empty: none."""
    data_parallel_rank: int = 0
    """Rank of the engine among the data-parallel ranks."""
    describes: bool = True
    """As that of `WorkerLaunch`."""


class FrontendLaunch(msgspec.Struct, frozen=True):
    """For `python -m frontend.main`."""

    config: EngineConfig
    server: ServerConfig
    checkpoint: Checkpoint
    engines: list[EngineAddress]
    """The engines at this moment; later changes come through `control`."""
    supervisor: str
    listen_fd: int
    """The listening TCP socket, inherited."""
    index: int = 0
    """Number of this frontend, from 0."""
    num_frontends: int = 1
    """They share the port, and the limits of admission in equal parts."""
    control: str = ""
    """ZMQ endpoint of the supervisor's ROUTER that sends `Engines`; empty: the engines never change."""
    run_dir: str = ""
    """Directory of this node's server, with files of the frontends for one another: their counters, and the
    streams that can be resumed; empty: they have none."""
    life: int = 0
    """How often this frontend was restarted."""
    state: ServerState = ServerState()
    """What administrators have set; later changes come through `control`."""
    admin_fd: int | None = None
    """The listening socket of the administration, inherited; None: this frontend does not serve it."""
    first_life: int = 0
    """Added to `life` in the ids of requests: those of the server that this one replaces are others. Above 0:
    the first life of a frontend accepts connections only once an engine is ready."""
    started_at: float = 0.0
    """When the server was started: the monotonic clock, which all processes of a host share."""
    other_fds: dict[int, int] = {}
    """By number: the listening TCP sockets of the other frontends of its node, inherited. It accepts their
    connections while they are down."""

    @property
    def name(self) -> str:
        """Its name in log lines, and in messages to the supervisor."""
        return "frontend" if self.num_frontends == 1 else f"frontend {self.index}"


class PrepareLaunch(msgspec.Struct, frozen=True):
    """For `python -m workers.checkpoint.prepare`."""

    config: ModelConfig
    cache_dir: str
    """Where converted checkpoints are kept."""
    supervisor: str
    speculative: SpeculativeConfig = SpeculativeConfig()
    """Names the draft model, which is checked too."""
