"""Checks the values of config.json that several model families use.

A wrong value would otherwise fail much later, with a torch error, or not at all.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_REQUIRED = ("vocab_size", "max_position_embeddings")
_COUNTS = (*_REQUIRED, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DERIVED_COUNTS = ("num_key_value_heads", "head_dim", "sliding_window")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_ROPE_NUMBERS = ("rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor")
_MAX_COUNT = 2**31 - 1
_MAX_NUMBER = 1e30


def check_values(config: Mapping[str, Any], where: Path) -> None:
    """Raise ValueError, naming the file and the setting, for the first invalid value."""
    for name in _REQUIRED:
        if config.get(name) is None:
            raise ValueError(f"{where} has no {name}, which is required")
    count = f"a whole number from 1 to {_MAX_COUNT}"
    rope = config.get("rope_parameters", {})
    by_type = [each for each in rope.values() if isinstance(each, Mapping)]
    for settings, names, holds, kind in (
        (config, _COUNTS, _is_count, count),
        (_without_nulls(config), _DERIVED_COUNTS, _is_count, count),
        (_without_nulls(config), _SWITCHES, _is_switch, "true or false"),
        (config, ("rms_norm_eps",), _is_positive, "a number above 0"),
        *(
            (_without_nulls(each), _ROPE_NUMBERS, _is_positive, "a number above 0")
            for each in (rope, *by_type)
        ),
    ):
        for name in names:
            if name in settings and not holds(settings[name]):
                raise ValueError(f"{where}: {name} must be {kind}, not {json.dumps(settings[name]):.40}")


def id_list(value: Any, name: str, where: Path) -> list[int]:
    """Token ids, given as one id, a list or null. Raises ValueError."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ValueError(f"{where}: {name} must be a token id or a list of ids, not {json.dumps(value):.40}")
    return ids


def _without_nulls(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` without nulls, which mean the default."""
    return {name: value for name, value in settings.items() if value is not None}


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MAX_COUNT


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value is not True and 0 < value < _MAX_NUMBER
