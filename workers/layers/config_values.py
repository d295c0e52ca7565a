"""Checks of fields of config.json that a model family supports with some values only."""

from collections.abc import Mapping
from typing import Any


def check_value(config: Mapping[str, Any], name: str, *supported: object) -> None:
    """Raises ValueError if the field is present and its value is not supported."""
    if name in config and config[name] not in supported:
        values = ", ".join(map(str, supported))
        raise ValueError(
            f"{config['model_type']} with {name} {config[name]} is not supported; supported: {values}"
        )
