"""From request fields to sampling parameters."""

from typing import Any

from atom.sampling_params import SamplingParams
from frontend.errors import RequestError
from frontend.schemas.generation import GenerationRequest

__all__ = ["sampling_params", "stop_strings"]

MAX_STOPS = 64
MAX_STOP_LENGTH = 1024

_SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "seed", "n", "ignore_eos", "priority")


def sampling_params(
    request: GenerationRequest, defaults: dict[str, float | int], max_tokens: int
) -> SamplingParams:
    """Fields the request names, else the checkpoint's defaults, else ours.

    `max_tokens` counts where the request gives no limit. Raises RequestError naming the field.
    """
    values: dict[str, Any] = {**defaults, "max_tokens": max_tokens}
    for name in (*_SAME_NAME, "stop_token_ids", "max_tokens"):
        if (given := getattr(request, name)) is not None:
            values[name] = given
    if request.max_completion_tokens is not None:
        values["max_tokens"] = request.max_completion_tokens
    try:
        return SamplingParams(**values)
    except ValueError as error:
        # Their texts begin with the name of the field.
        raise RequestError(str(error), param=str(error).partition(" ")[0]) from None


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
