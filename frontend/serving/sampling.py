"""From request fields to sampling parameters."""

from typing import Any

from atom.sampling_params import SamplingParams
from frontend.errors import RequestError
from frontend.schemas.generation import GenerationRequest

__all__ = ["answer_limit", "sampling_params", "stop_strings"]

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
    request: GenerationRequest, defaults: dict[str, float | int], **settled: int | None
) -> SamplingParams:
    """Fields the request names, else the checkpoint's defaults, else ours.

    `settled` are parameters that the endpoint has worked out. Raises RequestError naming the
    field.
    """
    values: dict[str, Any] = {**defaults, **settled}
    for name in _SAME_NAME:
        if (given := getattr(request, name)) is not None:
            values[name] = given
    if request.logit_bias is not None:
        values["logit_bias"] = {_token_id(key): bias for key, bias in request.logit_bias.items()}
    try:
        return SamplingParams(**values)
    except ValueError as error:
        # Their texts begin with the name of the field.
        raise RequestError(str(error), param=str(error).partition(" ")[0]) from None


def answer_limit(request: GenerationRequest) -> int | None:
    """How many tokens the request wants at most; None where it does not say."""
    if request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """The stop strings of a request. An empty string alone asks for nothing."""
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
    # No more digits than any vocabulary needs: Python reads longer numbers slowly, or not at all.
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise RequestError(f"logit_bias has the key {key[:40]!r}, which is no token id", param="logit_bias")
    return int(key)
