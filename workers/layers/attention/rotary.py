"""RoPE: one table of cosines and sines for all layers with the same parameters.

P positions, R rotary dimension of a head (its first R features), T tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atom_ops import rotation_at
from workers.layers.attention.rotation import Rotation
from workers.layers.context import BuildContext

Rope = Mapping[str, Any]
"""`rope_parameters` of config.json."""


@dataclass(frozen=True, slots=True)
class NoRope:
    """Layers without RoPE, whose queries grow with their position."""

    growth: float
    """The factor at position p is 1 + growth * log1p((p + 1) // step)."""
    step: int


class RotaryEmbedding(nn.Module):
    """Maps positions to a `Rotation`."""

    cos_sin_PR: torch.Tensor
    query_scale_P1: torch.Tensor | None
    _axes_R: torch.Tensor | None

    def __init__(
        self, head_dim: int, rope: Rope | NoRope | None, build: BuildContext, interleaved: bool = False
    ):
        """`interleaved`: pairs are neighbouring features (GPT-J), not features of both halves (NeoX).

        Without RoPE all angles are 0, which leaves queries and keys as they are in every kernel.
        """
        super().__init__()
        self._interleaved = interleaved
        axes_R = None
        if rope is None or isinstance(rope, NoRope):
            frequencies, attention_factor = torch.zeros(head_dim // 2), 1.0
        else:
            frequencies, attention_factor = rope_frequencies(head_dim, rope, build.max_positions)
            axes_R = _axes(rope, len(frequencies))
        angles = torch.outer(torch.arange(build.max_positions, dtype=torch.float32), frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
        self.register_buffer("cos_sin_PR", table.to(build.device))
        scale_P1 = None if rope is None else _query_scale(rope, build.max_positions)
        self.register_buffer("query_scale_P1", None if scale_P1 is None else scale_P1.to(build.device))
        self.register_buffer("_axes_R", None if axes_R is None else axes_R.repeat(2).to(build.device))

    def table(self) -> torch.Tensor:
        """Each position's cosines, then its sines, float32 [P, R]."""
        return self.cos_sin_PR

    def forward(self, positions_T: torch.Tensor) -> Rotation:
        """The angles at `positions_T`; those of images have three, [3, T]: time, row and column."""
        if positions_T.ndim > 1:
            return self._by_axis(positions_T)
        cos_T1R, sin_T1R = rotation_at(self.cos_sin_PR, positions_T, self._interleaved)
        scale_T1 = None
        if self.query_scale_P1 is not None:
            scale_T1 = self.query_scale_P1.index_select(0, positions_T)
        return Rotation(cos_T1R, sin_T1R, self._interleaved, scale_T1)

    def _by_axis(self, positions_3T: torch.Tensor) -> Rotation:
        """Each feature pair turns by the position on its own axis."""
        axes_R = self._axes_R
        assert axes_R is not None, "images need mrope_section"
        tables_3TR = self.cos_sin_PR[positions_3T]
        axes_1TR = axes_R.expand(1, *tables_3TR.shape[1:])
        table_TR = tables_3TR.gather(0, axes_1TR)[0]
        tokens_T = torch.arange(len(table_TR), device=table_TR.device)
        return Rotation(*rotation_at(table_TR, tokens_T, self._interleaved), self._interleaved)


def _axes(rope: Rope, pairs: int) -> torch.Tensor | None:
    """The axis of each feature pair, in turns as far as each axis has pairs left; None without sections.

    Raises ValueError for sections that are not interleaved.
    """
    sections = rope.get("mrope_section")
    if sections is None:
        return None
    if rope.get("mrope_interleaved") is False:
        raise ValueError("rope_parameters with mrope_section, but not mrope_interleaved, are not supported")
    axes_R = torch.zeros(pairs, dtype=torch.int64)
    for axis in (1, 2):
        axes_R[axis : 3 * sections[axis] : 3] = axis
    return axes_R


def _query_scale(rope: Rope | NoRope, positions: int) -> torch.Tensor | None:
    """Factors [P, 1] of queries, which grow with each multiple of a length; None: 1."""
    if isinstance(rope, NoRope):
        lengths_P = torch.arange(1, positions + 1) // rope.step
        return (1 + rope.growth * torch.log1p(lengths_P.float()))[:, None]
    if not (beta := rope.get("llama_4_scaling_beta")):
        return None
    lengths_P = torch.arange(positions) // int(rope["original_max_position_embeddings"])
    return (1 + beta * torch.log1p(lengths_P.float()))[:, None]


def layers_with_rope(config: Mapping[str, Any]) -> list[bool]:
    """By layer, from `no_rope_layers` or `no_rope_layer_interval`.

    Raises ValueError for a list that is shorter than the model.
    """
    layers = config["num_hidden_layers"]
    stated = config["no_rope_layers"]
    if stated is None:
        return [(layer + 1) % config["no_rope_layer_interval"] != 0 for layer in range(layers)]
    if len(stated) < layers:
        raise ValueError(f"no_rope_layers has {len(stated)} entries for {layers} layers: state one for each")
    # Despite its name, an entry is 1 for a layer with RoPE.
    return [bool(each) for each in stated[:layers]]


def ropes_by_type(
    config: Mapping[str, Any], types: Sequence[str], thetas: Mapping[str, float]
) -> tuple[Rope, ...]:
    """The parameters of each layer, from `rope_parameters` by layer type, or those of full attention.

    In the latter case layers with a sliding window have the same theta, without scaling. `thetas` are the
    defaults by type. Raises ValueError for a type without parameters.
    """
    stated = config["rope_parameters"]
    if any(isinstance(value, Mapping) for value in stated.values()):
        by_type = stated
    else:
        plain = {name: stated[name] for name in ("rope_theta",) if name in stated}
        by_type = {"full_attention": stated, "sliding_attention": plain}
    if lacking := set(types) - by_type.keys():
        raise ValueError(f"config.json has layers of type {min(lacking)}, but no rope_parameters for them")
    return tuple({"rope_theta": thetas[kind], **by_type[kind]} for kind in types)


def rope_frequencies(head_dim: int, rope: Rope, longest: int) -> tuple[torch.Tensor, float]:
    """(radians per position of each feature pair, float32 [R / 2] on the CPU; factor on cosines and sines).

    `longest` is the length of the longest sequence. Types whose frequencies depend on the length use
    `longest` for every sequence, because RoPE is applied to a key once, before it is cached. Raises
    ValueError for an unsupported type and for a missing parameter.
    """
    kind = rope.get("rope_type", "default")
    if kind not in _TYPES:
        raise ValueError(f"rope type {kind} is not supported; supported: {', '.join(_TYPES)}")
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
    """Positions divided by `factor`."""
    return _geometric(width, rope["rope_theta"]) / rope["factor"], 1.0


def _dynamic(width: int, rope: Rope, longest: int) -> tuple[torch.Tensor, float]:
    """NTK scaling: theta grows with the length beyond original_max_position_embeddings."""
    factor = rope["factor"]
    ratio = max(longest / rope["original_max_position_embeddings"], 1.0)
    growth = (factor * ratio - (factor - 1)) ** (width / (width - 2))
    return _geometric(width, rope["rope_theta"] * growth), 1.0


def _llama3(width: int, rope: Rope, longest: int) -> tuple[torch.Tensor, float]:
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated."""
    frequencies = _geometric(width, rope["rope_theta"])
    factor = rope["factor"]
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    rotations = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor), 1.0


def _yarn(width: int, rope: Rope, longest: int) -> tuple[torch.Tensor, float]:
    """As llama3, but interpolated linearly by the index of the feature pair."""
    frequencies = _geometric(width, rope["rope_theta"])
    factor = rope["factor"]

    def correction_dim(rotations: float) -> float:
        """The feature pair that makes so many rotations over the original context length."""
        wavelength = rope["original_max_position_embeddings"] / (2 * math.pi * rotations)
        return width * math.log(wavelength) / (2 * math.log(rope["rope_theta"]))

    first = correction_dim(rope.get("beta_fast") or 32)
    last = correction_dim(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, width - 1)
    interpolated = ((torch.arange(len(frequencies)) - first) / ((last - first) or 0.001)).clamp(0, 1)
    return frequencies * (1 - interpolated + interpolated / factor), _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: Rope) -> float:
    """YaRN's mscale on cosines and sines: it sharpens attention over longer contexts."""
    if (factor := rope.get("attention_factor")) is not None:
        return float(factor)
    growth = 0.1 * math.log(max(rope["factor"], 1.0))
    mscale = rope.get("mscale")
    all_dim = rope.get("mscale_all_dim")
    if mscale and all_dim:
        return float((growth * mscale + 1) / (growth * all_dim + 1))
    return growth + 1


def _longrope(width: int, rope: Rope, longest: int) -> tuple[torch.Tensor, float]:
    """One factor per feature pair, from a list for short or a list for long contexts."""
    original = rope["original_max_position_embeddings"]
    factors = torch.tensor(rope["long_factor"] if longest > original else rope["short_factor"])
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(max(rope["factor"], 1.0)) / math.log(original))
    return _geometric(width, rope["rope_theta"]) / factors, attention_factor


_TYPES: Mapping[str, Callable[[int, Rope, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
