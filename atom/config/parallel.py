"""How the model is spread over processes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = 1
    """Worker processes that share every layer."""
    port: int | None = None
    """Base of the internal TCP ports between nodes. On one host everything is local sockets; HTTP is --server-port."""
