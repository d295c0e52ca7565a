"""--override-generation-config: how requests sample that do not say it."""

from atom.shared.config.fields import ConfigError, json_object
from atom.shared.sampling_params import SamplingParams

__all__ = ["generation_overrides"]

_FLAG = "--override-generation-config"
_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def generation_overrides(text: str | None) -> dict[str, float | int]:
    """The sampling parameters in the JSON object `text`; none for None. Raises ConfigError."""
    found = json_object(text or "{}")
    for name in found:
        if name not in _NAMES:
            raise ConfigError(f"{_FLAG}: {name!r:.40} is not one of {', '.join(_NAMES)}")
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ConfigError(f"{_FLAG}: {error}") from None
    return found
