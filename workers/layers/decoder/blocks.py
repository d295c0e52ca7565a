"""The interfaces of the two blocks of a decoder layer: its token mixer and its feed-forward block.

T tokens, D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.layers.attention.cache_groups import CacheGroup
from workers.layers.attention.rotation import Rotation
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.norm import RMSNorm


class TokenMixer(Protocol):
    """A decoder layer's attention, or its replacement such as linear attention."""

    name_on_disk: str
    """Its name within the layer."""

    def after_norm(
        self,
        norm: RMSNorm,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output for norm(x + residual), x + residual); see `RMSNorm.add_norm` for `x_TD`.

        The output is a partial sum over the tensor-parallel ranks.
        """


@dataclass(frozen=True)
class TokenMixers:
    """The token mixers of a family that does not use `SelfAttention` in every layer."""

    groups: list[CacheGroup]
    """Cache groups of all layers."""
    make: Callable[[int, BuildContext], TokenMixer]
    """Makes the token mixer of a layer; the context is that of the whole layer."""


class FeedForward(Protocol):
    """A decoder layer's MLP or mixture of experts."""

    def after_norm(
        self, norm: RMSNorm, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output for norm(x + residual), x + residual), as `TokenMixer.after_norm` returns it."""

    def __call__(self, normed_TD: torch.Tensor) -> torch.Tensor:
        """This rank's partial sum of the output."""
