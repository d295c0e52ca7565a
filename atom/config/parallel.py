"""How the model is split over processes."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """Number of workers that every layer is split over."""
    enable_expert_parallel: bool = False
    """Spread whole experts over the workers instead of splitting each expert."""
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    """First internal TCP port between nodes; unused on one host. The HTTP port is --server-port."""
