"""Groups of layers by what they cache: keys and values, latents, recurrent states, or plain rows."""

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


@dataclass(frozen=True, slots=True)
class RowShape:
    """A cached row of `width` numbers for every `rate` tokens."""

    width: int
    rate: int = 1


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Caches of plain rows, the same on every rank: compressed attention has several in a layer.

    `layers` numbers the caches, which are more than the model's layers.
    """

    layers: Sequence[int]
    shapes: Sequence[RowShape]
    """By cache, in the order of `layers`."""
    window: int = 0
    """As `KVGroup.window`."""


CacheGroup = KVGroup | LatentGroup | StateGroup | RowGroup
"""Layers that share one block table, or one state slot per request."""
