"""What loads and stores have in common: the KV cache, its tiers and the policy."""

from collections.abc import Callable, Sequence

from atom.shared.messages.kv_tiers import PEER
from atom.shared.messages.worker import FullAttentionSpec, KVSpec, RecurrentStateSpec
from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.kv_events import KVEventLog, listed_group
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.kv_tiers.kv_tier import KVTier
from engine_core.kv_tiers.tier_copies import OffloadPolicy
from engine_core.requests.iteration_quota import IterationQuota

__all__ = ["UNITS_PER_LOOKED_UP", "TieredCache"]

UNITS_PER_LOOKED_UP = 4
"""Units of the iteration's quota for a block that is looked up in all groups and tiers."""


class TieredCache:
    """The pools of the KV cache, by group, and the tiers, in the order in which they are read."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        pools: Sequence[BlockPool],
        tiers: Sequence[KVTier],
        policy: OffloadPolicy,
        quota: IterationQuota,
        hash_blocks: Callable[[RequestBlocks, int], int],
        events: KVEventLog | None,
    ):
        """`hash_blocks(blocks, n)` hashes n leading blocks within the quota; returns how many are hashed.

        `events`: the log of what the tiers, and the cache from them, gain and lose.
        """
        self.specs = list(specs)
        self.pools = list(pools)
        self.tiers = list(tiers)
        self.policy = policy
        self.quota = quota
        self.hash_blocks = hash_blocks
        self.block_size = next(spec.block_size for spec in specs if not isinstance(spec, RecurrentStateSpec))
        self.full_groups = [index for index, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
        self.events = events
        self.listed_group = listed_group(specs)
        self.shared_tier: int | None = None
        """Index of the tier that other engines share."""
        if policy.is_shared:
            self.shared_tier = max(index for index, tier in enumerate(tiers) if tier.by_content)
        self.peer_tier = next((index for index, tier in enumerate(tiers) if tier.medium == PEER), None)
        """Index of the tier that stands for the caches of other engines."""
