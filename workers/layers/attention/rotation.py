"""The angles of RoPE in one step. T tokens, R rotary dimension of a head."""

from dataclasses import dataclass
from functools import cached_property

import torch

from atom_ops import rotation


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines at the positions of one step's tokens, for all layers; see `atom_ops.rotation`."""

    cos_T1R: torch.Tensor
    sin_T1R: torch.Tensor
    interleaved: bool = False
    query_scale_T1: torch.Tensor | None = None
    """Factors of the tokens' queries; None: 1."""

    @cached_property
    def half_split(self) -> "Rotation":
        """The same angles for pairs of features of both halves (NeoX)."""
        if not self.interleaved:
            return self
        return Rotation(*rotation(self.cos_T1R[..., ::2], self.sin_T1R[..., 1::2]))
