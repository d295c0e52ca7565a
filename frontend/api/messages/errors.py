"""Anthropic's error object."""

from typing import Any

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
_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}
"""By the field at fault. The tool runner of Anthropic's SDK then goes on without `thread`."""


def anthropic_error(error: ApiError) -> bytes:
    """`error` as JSON."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _TYPES.get(error.status, default)
    info: dict[str, Any] = {"type": kind, "message": printable(error.message)}
    if error.param in _DETAILS:
        info["details"] = _DETAILS[error.param]
    return msgspec.json.encode({"type": "error", "error": info})
