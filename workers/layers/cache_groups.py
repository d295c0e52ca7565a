"""What the layers of a model keep of each token, or of each request."""

from collections.abc import Sequence
from dataclasses import dataclass

from atom_ops import StateShape
from workers.layers.attention import KVGroup


@dataclass(frozen=True, slots=True)
class LatentGroup:
    """Layers of latent attention: one row a token for all heads, the same on every rank."""

    layers: Sequence[int]
    latent_width: int
    rope_width: int
    index_width: int = 0
    indexed: Sequence[int] = ()
    """Those of the layers that keep an index key of so many numbers beside each row."""


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Recurrent layers: one state a request, however long it is."""

    layers: Sequence[int]
    shape: StateShape
    """On this rank."""


CacheGroup = KVGroup | LatentGroup | StateGroup
"""Layers that share one block table because they keep the same tokens, all in one shape; or one slot."""
