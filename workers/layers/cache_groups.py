"""What the layers of a model keep of each token."""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.layers.attention import KVGroup


@dataclass(frozen=True, slots=True)
class LatentGroup:
    """Layers of latent attention: one row a token for all heads, the same on every rank."""

    layers: Sequence[int]
    latent_width: int
    rope_width: int


CacheGroup = KVGroup | LatentGroup
"""Layers that share one block table because they keep the same tokens, all in one shape."""
