"""The whole engine configuration, one frozen value that every process receives."""

from dataclasses import dataclass, field

from atom.shared.config.cache import CacheConfig
from atom.shared.config.device import DeviceConfig
from atom.shared.config.kv_transfer import reads_peers
from atom.shared.config.model import ModelConfig
from atom.shared.config.observability import ObservabilityConfig
from atom.shared.config.parallel import ParallelConfig
from atom.shared.config.reliability import ReliabilityConfig
from atom.shared.config.scheduler import SchedulerConfig
from atom.shared.config.speculative import SpeculativeConfig


@dataclass(frozen=True)
class EngineConfig:
    """One field for each concern."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    @property
    def block_tokens(self) -> int:
        """Tokens of one KV block: each rank of a decode-context-parallel group has `block_size` of them."""
        return self.cache.block_size * self.parallel.decode_context_parallel_size

    @property
    def shares_blocks(self) -> bool:
        """Whether an engine finds what others store in the last of its tiers meanwhile."""
        cache = self.cache
        is_remote = cache.kv_offload_remote_url is not None
        hands_over = self.parallel.prefill_engines > 0 and not reads_peers(cache)
        return cache.kv_offload_shared or is_remote or hands_over

    @property
    def adapts_draft_width(self) -> bool:
        """Whether a step has drafts for all of its rows or for none, by what they gain.

        A CPU computes the drafts of each row that has some. Engines in lockstep launch steps of one width.
        """
        adaptive = self.speculative.spec_decode_adaptive
        return adaptive and self.device.device != "cpu" and not self.parallel.lockstep
