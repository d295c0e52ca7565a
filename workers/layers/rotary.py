"""Rotary position embedding: the table of angles, once for all layers.

P positions, R rotated features of a head (its first ones), T tokens.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atom_ops import rotation_at
from workers.layers.context import BuildContext

Rope = Mapping[str, Any]
"""`rope_parameters` of config.json."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of one step's tokens, for all layers."""

    cos_T1R: torch.Tensor
    sin_T1R: torch.Tensor


class RotaryEmbedding(nn.Module):
    """Positions to angles."""

    cos_sin_PR: torch.Tensor

    def __init__(self, head_dim: int, rope: Rope, build: BuildContext, interleaved: bool = False):
        """`interleaved`: pairs are neighbouring features, not those of both halves."""
        super().__init__()
        self._interleaved = interleaved
        frequencies, amplitude = rope_frequencies(head_dim, rope, build.max_positions)
        angles = torch.outer(torch.arange(build.max_positions, dtype=torch.float32), frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude
        self.register_buffer("cos_sin_PR", table.to(build.device))

    def forward(self, positions_T: torch.Tensor) -> Rotation:
        return Rotation(*rotation_at(self.cos_sin_PR, positions_T, self._interleaved))


def rope_frequencies(head_dim: int, rope: Rope, longest: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each feature pair, fp32 [R / 2] on the CPU, and the factor on their
    cosines and sines.

    `longest` is the length of the longest sequence that will ever run. Types whose frequencies
    depend on a sequence's length take those of the longest for all of them: a cached key has
    been turned once, whatever its sequence grows to. Raises ValueError for a type that does not
    run and for a parameter that is missing.
    """
    kind = rope.get("rope_type", "default")
    if kind not in _TYPES:
        raise ValueError(f"rope type {kind} is not supported; these are: {', '.join(_TYPES)}")
    width = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    try:
        return _TYPES[kind](width, rope, longest)
    except KeyError as missing:
        raise ValueError(f"config.json lacks rope_parameters.{missing.args[0]} (rope type {kind})") from None


def _geometric(width: int, theta: float) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)


def _default(width: int, rope: Rope, longest: int) -> tuple[torch.Tensor, float]:
    return _geometric(width, rope["rope_theta"]), 1.0


def _linear(width: int, rope: Rope, longest: int) -> tuple[torch.Tensor, float]:
    """As if positions were closer together."""
    return _geometric(width, rope["rope_theta"]) / rope["factor"], 1.0


def _dynamic(width: int, rope: Rope, longest: int) -> tuple[torch.Tensor, float]:
    """A base that grows with the length from where the model was trained to; below it, the default."""
    factor = rope["factor"]
    times = max(longest / rope["original_max_position_embeddings"], 1.0)
    growth = (factor * times - (factor - 1)) ** (width / (width - 2))
    return _geometric(width, rope["rope_theta"] * growth), 1.0


def _llama3(width: int, rope: Rope, longest: int) -> tuple[torch.Tensor, float]:
    """Slow rotations are stretched by `factor`, fast ones kept, those between blended."""
    frequencies = _geometric(width, rope["rope_theta"])
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor), 1.0


def _yarn(width: int, rope: Rope, longest: int) -> tuple[torch.Tensor, float]:
    """As llama3, but blended linearly between two pairs of features, by their number."""
    frequencies, factor = _geometric(width, rope["rope_theta"]), rope["factor"]

    def pair_that_turns(times: float) -> float:
        wave = rope["original_max_position_embeddings"] / (2 * math.pi * times)
        return width * math.log(wave) / (2 * math.log(rope["rope_theta"]))

    first, last = pair_that_turns(rope.get("beta_fast") or 32), pair_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    stretched = ((torch.arange(len(frequencies)) - first) / ((last - first) or 0.001)).clamp(0, 1)
    return frequencies * (1 - stretched + stretched / factor), _yarn_amplitude(rope)


def _yarn_amplitude(rope: Rope) -> float:
    """Longer contexts spread attention thinner; larger cosines and sines sharpen it again."""
    if (stated := rope.get("attention_factor")) is not None:
        return float(stated)
    growth = 0.1 * math.log(max(rope["factor"], 1.0))
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dim:
        return float((growth * mscale + 1) / (growth * all_dim + 1))
    return growth + 1


def _longrope(width: int, rope: Rope, longest: int) -> tuple[torch.Tensor, float]:
    """A factor of its own for each pair, from one list for short sequences and one for long ones."""
    original = rope["original_max_position_embeddings"]
    factors = torch.tensor(rope["long_factor"] if longest > original else rope["short_factor"])
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(max(rope["factor"], 1.0)) / math.log(original))
    return _geometric(width, rope["rope_theta"]) / factors, amplitude


_TYPES: Mapping[str, Callable[[int, Rope, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
