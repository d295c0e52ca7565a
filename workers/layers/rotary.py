"""Rotary position embedding: the table of angles, once for all layers.

P positions, R rotated features, T tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atom_ops import rotation_at
from workers.layers.context import BuildContext


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of one step's tokens, for all layers."""

    cos_T1R: torch.Tensor
    sin_T1R: torch.Tensor


class RotaryEmbedding(nn.Module):
    """Positions to angles."""

    cos_sin_PR: torch.Tensor

    def __init__(self, head_dim: int, rope: Mapping[str, Any], build: BuildContext):
        super().__init__()
        frequencies = inverse_frequencies(head_dim, rope)
        angles = torch.outer(torch.arange(build.max_positions, dtype=torch.float32), frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.register_buffer("cos_sin_PR", table.to(build.device))

    def forward(self, positions_T: torch.Tensor) -> Rotation:
        return Rotation(*rotation_at(self.cos_sin_PR, positions_T))


def inverse_frequencies(head_dim: int, rope: Mapping[str, Any]) -> torch.Tensor:
    """Radians per position of each feature pair, fp32 [head_dim / 2], on the CPU.

    `rope` is `rope_parameters` of config.json. Raises ValueError for a type that does not run.
    """
    kind = rope.get("rope_type", "default")
    if kind not in _SCALINGS:
        runs = ", ".join(_SCALINGS)
        raise ValueError(f"rope type {kind} is not supported; these are: {runs}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rope_parameters.partial_rotary_factor other than 1 is not supported")
    if "rope_theta" not in rope:
        raise ValueError("config.json lacks rope_parameters.rope_theta")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return _SCALINGS[kind](1.0 / rope["rope_theta"] ** exponents, rope)


def _unscaled(frequencies: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    return frequencies


def _linear(frequencies: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    return frequencies / rope["factor"]


def _llama3(frequencies: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Slow rotations are stretched by `factor`, fast ones kept, those between blended."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


_SCALINGS = {"default": _unscaled, "linear": _linear, "llama3": _llama3}
