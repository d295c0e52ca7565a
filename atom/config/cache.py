"""The KV cache."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


@dataclass(frozen=True)
class CacheConfig:
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Tokens in one KV block: a power of two, or a multiple of 16."""
    kv_cache_dtype: Literal["auto", "bf16", "fp8"] = "auto"
    """Type of stored keys and values. auto takes the compute dtype."""
    enable_prefix_caching: bool = True
    """Share the KV blocks of equal prompt beginnings; off where a model keeps recurrent states."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Fraction of a GPU's memory that weights and KV cache may fill together."""
    kv_cache_memory_bytes: Annotated[int, Meta(ge=1)] | None = None
    """Bytes of KV cache on each worker; measured on a GPU, up to 4 GiB on a CPU when absent."""
    num_kv_blocks: Annotated[int, Meta(ge=1)] | None = None
    """Exact number of KV blocks, overriding every memory rule."""
