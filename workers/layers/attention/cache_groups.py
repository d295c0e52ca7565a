"""Groups of layers by what they cache: keys and values, latents, or recurrent states."""

from collections.abc import Sequence
from dataclasses import dataclass

from atom_ops import ALL_TOKENS, StateShape, TokenShard
from workers.layers.attention.attention import KVGroup


@dataclass(frozen=True, slots=True)
class LatentGroup:
    """MLA layers: one cached row per token for all heads, on every rank unless `shard` splits them."""

    layers: Sequence[int]
    latent_width: int
    rope_width: int
    index_width: int = 0
    indexed: Sequence[int] = ()
    """The layers with an indexer: they also cache an index key of `index_width` numbers per token."""
    shard: TokenShard = ALL_TOKENS
    """The tokens that this rank caches."""


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Recurrent layers: one state of fixed size per request."""

    layers: Sequence[int]
    shape: StateShape
    """Shape of one layer's state on this rank."""
    places: int = 1
    """States of one request that are kept: with drafts one after each token of a step."""


CacheGroup = KVGroup | LatentGroup | StateGroup
"""Layers that share one block table, or one state slot per request."""
