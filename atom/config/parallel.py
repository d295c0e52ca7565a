"""How the model is spread over processes."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """Worker processes that share every layer."""
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    """Base of the internal TCP ports between nodes; one host needs none. HTTP is --server-port."""
