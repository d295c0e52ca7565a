"""What a caller may ask of one generation."""

import math
from dataclasses import dataclass

SEED_LIMIT = 1 << 64


@dataclass(slots=True)
class SamplingParams:
    """Sampling and stopping of one request; every field is checked here, once.

    Raises ValueError naming the field for a value outside its range.
    """

    temperature: float = 1.0
    """0 takes the most likely token; larger is more random."""
    max_tokens: int = 64
    """Tokens to generate at most."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""
    stop_strings: list[str] | None = None
    """End before the first of these appears in the text; it is not part of the result."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities add up to this."""
    top_k: int = -1
    """Keep this many most likely tokens; -1 or 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    seed: int | None = None
    """Makes the draws repeatable; drawn at random where absent."""
    n: int = 1
    """Independent choices for the same prompt."""
    priority: int = 0
    """Smaller runs first under `--scheduling-policy priority`."""
    stop_token_ids: list[int] | None = None
    """End with the first of these ids; it is not part of the text."""

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, 0.0, 100.0)
        _require_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_integer("top_k", self.top_k, -1, 1 << 31)
        _require_integer("max_tokens", self.max_tokens, 1, 1 << 31)
        _require_integer("n", self.n, 1, 128)
        _require_integer("priority", self.priority, -(1 << 31), 1 << 31)
        if self.seed is not None:
            # OpenAI's seeds are signed 64 bit; unsigned ones come from other engines.
            _require_integer("seed", self.seed, -(1 << 63), SEED_LIMIT - 1)
        for text in self.stop_strings or ():
            if not isinstance(text, str) or not text:
                raise ValueError("stop_strings must be non-empty strings")
        for token_id in self.stop_token_ids or ():
            _require_integer("stop_token_ids", token_id, 0, 1 << 31)


def _require_number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not valid or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must be in {bracket}{low:g}, {high:g}], not {value!r}")


def _require_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], not {value}")
