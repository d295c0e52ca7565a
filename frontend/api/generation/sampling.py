"""Sampling parameters from request fields."""

from typing import Any

from atom.shared.sampling_params import SamplingParams
from frontend.api.schemas.generation import GenerationRequest
from frontend.errors import RequestError

__all__ = ["requested_max_tokens", "sampling_params", "stop_strings"]

MAX_STOPS = 64
MAX_STOP_LENGTH = 1024

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "ignore_eos",
    "priority",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
)


def sampling_params(
    request: GenerationRequest, defaults: dict[str, float | int], **overrides: int | None
) -> SamplingParams:
    """The request's fields, else the checkpoint's defaults, else SamplingParams' defaults.

    `overrides` replace the defaults. Raises RequestError naming the field.
    """
    values: dict[str, Any] = {**defaults, **overrides}
    for name in _SAME_NAME:
        if (given := getattr(request, name)) is not None:
            values[name] = given
    if request.logit_bias is not None:
        values["logit_bias"] = {_token_id(key): bias for key, bias in request.logit_bias.items()}
    try:
        return SamplingParams(**values)
    except ValueError as error:
        # SamplingParams puts the field's name first in its messages.
        raise RequestError(str(error), param=str(error).partition(" ")[0]) from None


def requested_max_tokens(request: GenerationRequest) -> int | None:
    """The request's limit on generated tokens; None where it has none."""
    if request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """The stop strings of a request; `""` alone means none."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if stop == "":
        return []
    if len(stops) > MAX_STOPS:
        raise RequestError(f"'stop' has {len(stops)} strings, at most {MAX_STOPS} are allowed", param="stop")
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise RequestError(
                f"'stop' strings must have 1 to {MAX_STOP_LENGTH} characters, not {len(text)}", param="stop"
            )
    return stops


def _token_id(key: str) -> int:
    # int() is slow for very long digit strings, and refuses some.
    # "05" and "5" would be one token with two biases.
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
        raise RequestError(
            f"logit_bias has the key {key[:40]!r}, which is not a token id", param="logit_bias"
        )
    return int(key)
