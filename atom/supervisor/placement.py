"""Which node each engine, worker and frontend runs on, and the TCP ports that it needs there.

Workers fill the nodes in the order of their ranks. A core is on the node of its first worker. Sockets whose
two ends are always on one node are local; the others get a port, which the binder's supervisor binds once and
keeps over all lives:

    core-R       frontends of engine R            workers-R    the core of engine R, for its workers
    wave-W       worker W of engines in lockstep  store-R      the TCPStore of the workers of engines R …

A store is a port even on one node: torch has no other.
"""

from atom.shared.config.parallel import ParallelConfig
from atom.shared.messages.nodes import Port
from atom.shared.utils.net import ListenPort

__all__ = ["NodePorts", "Placement"]

_LOOPBACK = "127.0.0.1"


class Placement:
    """`parallel` is resolved; frontends are on every node if `frontend_per_node`, else on node 0."""

    def __init__(self, parallel: ParallelConfig, frontend_per_node: bool = False):
        self._parallel = parallel
        self.frontend_nodes = range(parallel.nnodes if frontend_per_node else 1)
        engines = range(parallel.data_parallel_size)
        self.groups = [engines] if parallel.lockstep else [engines[rank : rank + 1] for rank in engines]
        """The engines that share collectives."""

    def node_of(self, engine: int, worker: int = 0) -> int:
        """The node of a worker; the core is on that of worker 0."""
        return self._parallel.world_rank(engine, worker) // self._parallel.workers_per_node

    def nodes_of(self, engines: range) -> set[int]:
        """The nodes of these engines."""
        last = self._parallel.tensor_parallel_size - 1
        return set(range(self.node_of(engines[0]), self.node_of(engines[-1], last) + 1))

    def device_of(self, engine: int, worker: int) -> int:
        """Number of a worker among those of its node."""
        return self._parallel.world_rank(engine, worker) % self._parallel.workers_per_node

    def ports(self, node: int) -> dict[str, bool]:
        """The ports of a node, by name, and whether other nodes connect to them."""
        found: dict[str, bool] = {}
        workers = range(self._parallel.tensor_parallel_size)
        for group in self.groups:
            is_spread = len(self.nodes_of(group)) > 1
            if len(group) * len(workers) > 1 and self.node_of(group[0]) == node:
                found[f"store-{group[0]}"] = is_spread
            for engine in group:
                if self.node_of(engine) == node:
                    if set(self.frontend_nodes) != {node}:
                        found[f"core-{engine}"] = True
                    if len(self.nodes_of(range(engine, engine + 1))) > 1:
                        found[f"workers-{engine}"] = True
                if is_spread and len(group) > 1:
                    here = (worker for worker in workers if self.node_of(engine, worker) == node)
                    found |= {f"wave-{self._parallel.world_rank(engine, each)}": True for each in here}
        return found


class NodePorts:
    """The ports of this node, bound until `close`; consecutive from `first`, or free ones."""

    def __init__(self, placement: Placement, node: int, address: str, first: int | None = None):
        """Ports for this node alone are on the loopback interface, and free ones. Raises ListenError."""
        self._bound: list[ListenPort] = []
        self.ports: dict[str, Port] = {}
        try:
            for name, is_public in placement.ports(node).items():
                where = address if is_public else _LOOPBACK
                number = first if is_public and first is not None else 0
                bound = ListenPort(where, number, flag="--port")
                self._bound.append(bound)
                self.ports[name] = Port(where, bound.port, bound.open(0).fileno())
                if number:
                    first = number + 1
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the sockets."""
        for bound in self._bound:
            bound.close_all()
