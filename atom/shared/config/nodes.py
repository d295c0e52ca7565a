"""This node's place among several; see docs/operate/multi-node.md."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from atom.shared.config.fields import ConfigError

_SECRET_CHARACTERS = 16
_HOW = "the same on every node, at least 16 characters, such as those of `openssl rand -hex 32`"


@dataclass(frozen=True)
class NodesConfig:
    node_rank: Annotated[int, Meta(ge=0)] = 0
    """Rank of this node among --nnodes; node 0 is the master: it starts all processes and serves HTTP."""
    master_addr: Annotated[str, Meta(min_length=1)] | None = None
    """IPv4 address or name of node 0, in the network of the nodes; needed with --nnodes."""
    master_port: Annotated[int, Meta(ge=1, le=65535)] = 29500
    """TCP port of node 0 at which the other nodes join."""
    local_addr: Annotated[str, Meta(min_length=1)] | None = None
    """IPv4 address or interface of this node for the other nodes. If unset: that of the route to node 0."""
    local_rank: Annotated[int, Meta(ge=0)] = 0
    """Rank among the nodes of one host that share its GPUs: each takes as many GPUs as it has workers."""
    cluster_secret: Annotated[str, Meta(min_length=1)] | None = None
    """Secret of all nodes, needed with --nnodes. Set ATOM_CLUSTER_SECRET instead to hide it from `ps`."""
    cluster_secret_file: Annotated[str, Meta(min_length=1)] | None = None
    """File with that secret."""
    join_timeout: Annotated[float, Meta(gt=0)] = 1800.0
    """Seconds that nodes wait for one another: at the start, and to join again after a loss."""
    frontend_per_node: bool = False
    """Serve HTTP on every node, for all engines; else on node 0 alone."""

    def check(self, nnodes: int) -> None:
        """Raises ConfigError for values that contradict one another."""
        if self.node_rank >= nnodes:
            raise ConfigError(
                f"--node-rank {self.node_rank}: the ranks of --nnodes {nnodes} end at {nnodes - 1}"
            )
        if nnodes > 1 and self.master_addr is None:
            raise ConfigError(f"--nnodes {nnodes} needs --master-addr, the address of node 0")

    def secret(self) -> bytes:
        """The cluster secret. Raises ConfigError if there is none, or it is too short."""
        if (self.cluster_secret is None) == (self.cluster_secret_file is None):
            problem = "several nodes need" if self.cluster_secret is None else "use one of"
            raise ConfigError(f"{problem} --cluster-secret-file or ATOM_CLUSTER_SECRET: {_HOW}")
        text = self.cluster_secret
        if self.cluster_secret_file is not None:
            try:
                text = Path(self.cluster_secret_file).expanduser().read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
                raise ConfigError(f"--cluster-secret-file {self.cluster_secret_file}: {reason}") from None
        assert text is not None
        if len(text) < _SECRET_CHARACTERS:
            raise ConfigError(f"the cluster secret has {len(text)} characters: it must be {_HOW}")
        return text.encode()


def first_device(local_rank: int, workers: int, gpus: int) -> int:
    """Index of the first GPU of a node with so many workers, among those that it sees.

    A node that sees exactly as many GPUs as it has workers uses these: its launcher has chosen them. Raises
    ConfigError if there are too few.
    """
    if gpus == workers:
        return 0
    first = local_rank * workers
    if first + workers > gpus:
        raise ConfigError(
            f"--local-rank {local_rank} with {workers} workers needs {first + workers} GPUs, not {gpus}"
        )
    return first
