"""Messages between the supervisors of several nodes: node 0's, the master, and those of the others.

The master binds a ROUTER at --master-port, each node connects a DEALER. A connection is a session: when it
ends, the node ends its processes, and the master counts the node as lost. libzmq's pings notice a peer that
has vanished; the master's Beat only asks whether the connection still stands.

Start-up:   node -> Join, master -> Welcome or Refused
Any time:   master -> Start, Signal, EndLife, Deliver, RefuseConnections, SetEngines, Beat
            node -> Report, Exited, SetState, WantTrial, RestartEngines
End:        node -> Leaving (it was told to end), master -> Stop
"""

import msgspec

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.server import ServerConfig
from atom.shared.messages.admin import ServerState
from atom.shared.messages.supervisor import Engines, RestartEngines, WantTrial
from atom.shared.utils.exit_status import ExitStatus


class Port(msgspec.Struct, array_like=True, frozen=True):
    """A listening socket that the supervisor of a node has bound, and keeps."""

    address: str
    port: int
    fd: int
    """File descriptor in that supervisor, which its children inherit."""


class NodeInfo(msgspec.Struct, array_like=True, frozen=True):
    """What the master must know of a node, to start processes there."""

    rank: int
    address: str
    """IPv4 address by which the other nodes reach it."""
    interface: str
    """The network interface of that address."""
    run_dir: str
    config: EngineConfig
    """As resolved on that node."""
    checkpoint: Checkpoint
    """As prepared on that node: its paths are that node's."""
    server: ServerConfig
    ports: dict[str, Port]
    """Sockets by the names of `atom.supervisor.placement`."""
    first_device: int = 0
    """Index of the first worker's GPU among those that the node sees."""


class Join(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The first message of a node."""

    identity: dict[str, str]
    """What must be the same on all nodes, by its name for people: version, model, flags."""
    node: NodeInfo


class JoinIdentity(msgspec.Struct, tag=1, array_like=True, frozen=True, gc=False):
    """The beginning of a Join, which every version reads."""

    identity: dict[str, str]


class Report(msgspec.Struct, tag=2, array_like=True, frozen=True, gc=False):
    """A frame that a process has sent to its supervisor."""

    life: str
    frame: bytes


class Exited(msgspec.Struct, tag=3, array_like=True, frozen=True, gc=False):
    """A process has ended; its reports came before."""

    life: str
    process: str
    status: int
    """Return code as subprocess gives it: negative for a signal."""


class SetState(msgspec.Struct, tag=4, array_like=True, frozen=True, gc=False):
    """An administrator has set the state at a frontend of this node."""

    state: ServerState


class Leaving(msgspec.Struct, tag=5, array_like=True, frozen=True, gc=False):
    """The node was told to end: it waits for Stop."""


FromNode = Join | Report | Exited | SetState | Leaving | WantTrial | RestartEngines


class Welcome(msgspec.Struct, tag=20, array_like=True, frozen=True, gc=False):
    """The node is one of the server's."""


class Refused(msgspec.Struct, tag=21, array_like=True, frozen=True, gc=False):
    """The node cannot join."""

    reason: str
    """Why the node is refused, in one line."""
    is_final: bool
    """Whether it would be refused again."""


class Start(msgspec.Struct, tag=22, array_like=True, frozen=True, gc=False):
    """Start a process."""

    life: str
    process: str
    module: str
    launch: bytes
    """Its launch message, as JSON."""
    pass_fds: list[int]
    http: int | None = None
    """The number, on that node, of the HTTP socket that the process gets; None: it gets none."""


class Signal(msgspec.Struct, tag=23, array_like=True, frozen=True, gc=False):
    """Send a signal to a process."""

    life: str
    process: str
    number: int


class EndLife(msgspec.Struct, tag=24, array_like=True, frozen=True, gc=False):
    """Kill what is left of a life, and remove its sockets."""

    life: str


class Deliver(msgspec.Struct, tag=25, array_like=True, frozen=True, gc=False):
    """Send a frame to a local endpoint of this node."""

    endpoint: str
    frame: bytes


class RefuseConnections(msgspec.Struct, tag=26, array_like=True, frozen=True, gc=False):
    """Close the supervisor's copy of an HTTP socket."""

    http: int


class SetEngines(msgspec.Struct, tag=27, array_like=True, frozen=True, gc=False):
    """The engines that run, for the node's frontends."""

    engines: Engines


class Beat(msgspec.Struct, tag=28, array_like=True, frozen=True, gc=False):
    """The master is alive."""


class Stop(msgspec.Struct, tag=29, array_like=True, frozen=True, gc=False):
    """End with this exit status."""

    reason: str
    """One line; empty after a regular end."""
    status: int = ExitStatus.DONE


ToNode = Welcome | Refused | Start | Signal | EndLife | Deliver | RefuseConnections | SetEngines | Beat | Stop
