"""The sliding window of each layer from config.json: a number of tokens, or None for full attention."""

from collections.abc import Mapping
from typing import Any

_FULL = "full_attention"
_SLIDING = "sliding_attention"

Windows = tuple[int | None, ...]
"""Sliding window of each layer in tokens; None: full attention."""


def same_window(config: Mapping[str, Any]) -> Windows:
    """`sliding_window` in every layer, unless use_sliding_window is false."""
    in_use = config.get("use_sliding_window", True)
    return (config.get("sliding_window") if in_use else None,) * config["num_hidden_layers"]


def windows_of_types(config: Mapping[str, Any]) -> Windows:
    """`sliding_window` in the layers that `layer_types` names, or in those from max_window_layers on.

    The second form is the older one; both need `use_sliding_window`. Raises KeyError for a missing
    field, ValueError for inconsistent ones.
    """
    layers = config["num_hidden_layers"]
    in_use = config.get("use_sliding_window", False)
    types = config.get("layer_types")
    if types is None:
        first = config["max_window_layers"] if in_use else layers
        types = [_SLIDING if layer >= first else _FULL for layer in range(layers)]
    return windows_by_type(types, config.get("sliding_window") if in_use else None, layers)


def every_nth_full(every: int, layers: int) -> list[str]:
    """`layer_types` with full attention in every `every`-th layer and a sliding window in the others."""
    return [_SLIDING if (layer + 1) % every else _FULL for layer in range(layers)]


def windows_by_type(types: list[str], window: int | None, layers: int) -> Windows:
    """`window` in every sliding layer. Raises ValueError for inconsistent `types`."""
    if len(types) != layers or not set(types) <= {_FULL, _SLIDING}:
        raise ValueError(
            f"layer_types must be one of {_FULL}, {_SLIDING} for each of the {layers} layers: {types}"
        )
    if window is None and _SLIDING in types:
        raise ValueError(
            f"layer_types has {_SLIDING}, but sliding_window is not set (or use_sliding_window is false)"
        )
    return tuple(window if kind == _SLIDING else None for kind in types)
