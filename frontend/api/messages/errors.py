"""Anthropic's error object."""

import msgspec

from frontend.errors import ApiError, printable

__all__ = ["anthropic_error"]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError) -> bytes:
    """`error` as JSON."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _TYPES.get(error.status, default)
    info = {"type": kind, "message": printable(error.message)}
    return msgspec.json.encode({"type": "error", "error": info})
