"""The KV cache."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from atom.shared.config.fields import NAMES, OBJECT, bytes_from

DEFAULT_TRANSFER_PORT = 5600


@dataclass(frozen=True)
class CacheConfig:
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Tokens per KV block: a power of two or a multiple of 16."""
    kv_cache_dtype: Literal["auto", "bf16", "fp8"] = "auto"
    """Dtype of the KV cache. auto: FP8 if the checkpoint asks for it, else the compute dtype."""
    enable_prefix_caching: bool = True
    """Reuse the cached KV blocks of a common prompt prefix."""
    state_checkpoint_interval_tokens: Annotated[int, Meta(ge=1)] = 4096
    """The prefix cache keeps the state of recurrent layers every so many tokens, and at ends of prompts."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Fraction of a GPU's memory that this server uses: weights, activations and KV cache."""
    kv_cache_memory_bytes: Annotated[int, bytes_from(1)] | None = None
    """KV cache of each worker in bytes, or as 4G. If unset: what a GPU has left, on a CPU 4 GiB at most."""
    num_kv_blocks: Annotated[int, Meta(ge=1)] | None = None
    """Exact number of KV blocks; overrides the other memory settings."""
    kv_offload_memory: Annotated[int, bytes_from(1)] | None = None
    """Host memory of each worker for KV blocks that its cache evicts, in bytes, or as 64G. If unset: none."""
    kv_offload_dir: Annotated[str, Meta(min_length=1)] | None = None
    """Directory for KV blocks, which later starts find again; needs --kv-offload-disk."""
    kv_offload_disk: Annotated[int, bytes_from(1)] | None = None
    """Disk space of each worker's files in --kv-offload-dir, in bytes, or as 500G."""
    kv_offload_remote_url: Annotated[str, Meta(min_length=1)] | None = None
    """Redis or Valkey server for KV blocks, redis://HOST:PORT, or rediss:// with TLS; servers share it."""
    kv_offload_remote: Annotated[int, bytes_from(1)] | None = None
    """Bytes of each worker's blocks in --kv-offload-remote-url, or as 500G."""
    kv_offload_min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Keep there only blocks of sequences with so many cached tokens, and any that were hit before."""
    kv_offload_shared: bool = False
    """Find blocks in --kv-offload-dir that other servers store while this one runs, too."""
    kv_transfer_config: Annotated[str, OBJECT] | None = None
    """JSON object with vLLM's keys kv_connector and kv_role: kv_producer, kv_consumer or kv_both."""
    kv_transfer_host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """IPv4 address of this server at which others read the KV blocks of its prompts, with NixlConnector."""
    kv_transfer_port: Annotated[int, Meta(ge=1, le=65535)] = DEFAULT_TRANSFER_PORT
    """First of the ports there; each worker of each engine has one."""
    kv_transfer_peers: Annotated[str, NAMES] = "127.0.0.1"
    """Servers whose KV blocks requests may name: ADDRESS[/BITS][:PORT],…; PORT is 5600 if omitted."""
    kv_events_config: Annotated[str, OBJECT] | None = None
    """JSON object; '{"enable_kv_cache_events": true}' publishes what the prefix cache gains and loses."""

    @property
    def offloads(self) -> bool:
        """Whether blocks are kept outside of the KV cache."""
        tiers = self.kv_offload_memory, self.kv_offload_dir, self.kv_offload_remote_url
        return any(tier is not None for tier in tiers)
