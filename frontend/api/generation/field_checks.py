"""Checks of fields that the endpoints share, besides those of sampling."""

from frontend.api.schemas.generation import GenerationRequest
from frontend.errors import RequestError

__all__ = ["check_stream_options", "checked_timeout", "prompt_logprobs"]

_MAX_TIMEOUT_S = 86_400.0


def check_stream_options(fields: GenerationRequest) -> None:
    """Raises RequestError for options that are not supported."""
    options = fields.stream_options
    if options is None:
        return
    if not fields.stream:
        raise RequestError("'stream_options' needs 'stream': true", param="stream_options")
    if options.include_obfuscation:
        raise RequestError(
            "'stream_options.include_obfuscation' is not supported: leave it out or send false",
            param="stream_options.include_obfuscation",
            code="unsupported_parameter",
        )


def prompt_logprobs(fields: GenerationRequest) -> int | None:
    """Number of top tokens for each token of the prompt; None: no log probabilities. Raises RequestError."""
    count = fields.prompt_logprobs
    if count is True:
        raise RequestError("'prompt_logprobs' must be an integer, not true", param="prompt_logprobs")
    if count is None or count is False:
        return None
    if fields.stream:
        raise RequestError("'prompt_logprobs' cannot be streamed", param="prompt_logprobs")
    return count


def checked_timeout(seconds: float | None) -> float | None:
    """`seconds`, if it is a timeout that a request may have. Raises RequestError."""
    if seconds is not None and not 0 < seconds <= _MAX_TIMEOUT_S:
        raise RequestError(
            f"'timeout' must be more than 0 and at most {_MAX_TIMEOUT_S:.0f} seconds, not {seconds:g}",
            param="timeout",
        )
    return seconds
