"""Quantization of a plain checkpoint while it is loaded: what `--online-quant-config` says."""

import json
from dataclasses import dataclass
from typing import Any

from atom.shared.config.fields import ConfigError, json_object

_FLAG = "--online-quant-config"
FORMATS = {
    "ptpc_fp8": "FP8 with a scale for each output",
    "per_block_fp8": "FP8 in blocks of 128 x 128",
    "per_block128_fp8": "the same",
    "ptpc_int8": "INT8 with a scale for each output",
    "mxfp4": "4-bit floats in groups of 32 inputs",
    "int4_g32": "INT4 in groups of 32 inputs",
    "int4_g64": "INT4 in groups of 64 inputs",
    "int4_g128": "INT4 in groups of 128 inputs",
}
"""Name of a format -> what it is."""


@dataclass(frozen=True)
class OnlineQuantization:
    """Which format each layer is quantized to; layers that nothing names stay plain."""

    global_quant_config: str | None
    """Format of all layers that no pattern names; None: they stay plain."""
    layer_quant_config: tuple[tuple[str, str], ...]
    """(pattern, format) in order: the first pattern that matches a layer's path applies."""
    exclude_layer: tuple[str, ...]
    """Patterns of layers that stay plain, before all others."""

    def __str__(self) -> str:
        """As one line, for the log."""
        layers = [f"{pattern}: {name}" for pattern, name in self.layer_quant_config]
        everything = [f"all other layers: {self.global_quant_config or 'plain'}"]
        excluded = [f"plain: {', '.join(self.exclude_layer)}"] if self.exclude_layer else []
        return "; ".join([*excluded, *layers, *everything])


def online_quantization(text: str | None) -> OnlineQuantization | None:
    """The settings in `text`, a JSON object; None without one. Raises ConfigError."""
    if not text:
        return None
    given = json_object(text)
    known = ("global_quant_config", "layer_quant_config", "exclude_layer")
    for name in given:
        if name not in known:
            raise ConfigError(f"{_FLAG}: {name} is not supported; use {', '.join(known)}")
    whole = given.get("global_quant_config") or None
    layers = given.get("layer_quant_config") or {}
    if not isinstance(layers, dict):
        raise ConfigError(f"{_FLAG}: layer_quant_config is {_shown(layers)}: it must be an object")
    for value in [*([] if whole is None else [whole]), *layers.values()]:
        if not isinstance(value, str) or value not in FORMATS:
            raise ConfigError(
                f"{_FLAG}: the format {_shown(value)} is not supported; use {', '.join(FORMATS)}"
            )
    if whole is None and not layers:
        raise ConfigError(f"{_FLAG} names no format: give global_quant_config or layer_quant_config")
    return OnlineQuantization(whole, tuple(layers.items()), _patterns(given.get("exclude_layer")))


def _patterns(given: Any) -> tuple[str, ...]:
    """One pattern or a list of them."""
    found = [given] if isinstance(given, str) else given or []
    if not isinstance(found, list) or not all(isinstance(pattern, str) and pattern for pattern in found):
        raise ConfigError(f"{_FLAG}: exclude_layer is {_shown(given)}: it must be a list of layers' names")
    return tuple(found)


def _shown(value: Any) -> str:
    return f"{json.dumps(value):.40}"
