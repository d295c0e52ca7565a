"""The KV cache."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheConfig:
    block_size: int = 16
    """Tokens in one KV block."""
    kv_cache_dtype: str = "auto"
    """Type of stored keys and values: auto (the compute dtype), bf16 or fp8."""
    enable_prefix_caching: bool = True
    """Share the KV blocks of equal prompt beginnings."""
    gpu_memory_utilization: float = 0.9
    """Fraction of a GPU's memory that weights and KV cache may fill together."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of KV cache on each worker; measured on a GPU, up to 4 GiB on a CPU when absent."""
    num_kv_blocks: int | None = None
    """Exact number of KV blocks, overriding every memory rule."""
