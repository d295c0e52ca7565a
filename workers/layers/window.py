"""How far back each layer looks, as config.json says it: a number of tokens, or None for all."""

from collections.abc import Mapping
from typing import Any

_FULL, _SLIDING = "full_attention", "sliding_attention"

Windows = tuple[int | None, ...]
"""By layer."""


def same_window(config: Mapping[str, Any]) -> Windows:
    """`sliding_window` in every layer, unless the configuration says that it is not in use."""
    in_use = config.get("use_sliding_window", True)
    return (config.get("sliding_window") if in_use else None,) * config["num_hidden_layers"]


def windows_of_types(config: Mapping[str, Any]) -> Windows:
    """`sliding_window` in the layers that `layer_types` names, or in those from max_window_layers on.

    The second is the older form; both only count with `use_sliding_window`. Raises KeyError and
    ValueError for what does not fit together.
    """
    layers = config["num_hidden_layers"]
    in_use = config.get("use_sliding_window", False)
    types = config.get("layer_types")
    if types is None:
        first = config["max_window_layers"] if in_use else layers
        types = [_SLIDING if layer >= first else _FULL for layer in range(layers)]
    return windows_by_type(types, config.get("sliding_window") if in_use else None, layers)


def windows_by_type(types: list[str], window: int | None, layers: int) -> Windows:
    """The window in every sliding layer. Raises ValueError for types that do not fit."""
    if len(types) != layers or not set(types) <= {_FULL, _SLIDING}:
        raise ValueError(
            f"layer_types must be one of {_FULL}, {_SLIDING} for each of the {layers} layers: {types}"
        )
    if window is None and _SLIDING in types:
        raise ValueError(f"layer_types has {_SLIDING}, but sliding_window says nothing (or is not in use)")
    return tuple(window if kind == _SLIDING else None for kind in types)
