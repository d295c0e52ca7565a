"""What can go wrong with a request, and how the client reads it.

ApiError                 one answer with OpenAI's error object
├─ RequestError          the client's doing: 400, 401, 404, 408, 413 (a ValueError for the library)
├─ OverloadedError       429 with Retry-After: as many requests are waiting as may wait
├─ InternalError         500: a fault of this program
├─ UnavailableError      503 with Retry-After: starting, stopping or without an engine
└─ EngineError           500: the engine failed this request
   └─ EngineDeadError    the engine went away under it; code engine_dead
"""

from typing import ClassVar

import msgspec

# An answer quotes what the client sent; it need not send all of it back.
_MAX_MESSAGE = 2000
_MAX_PARAM = 200


class ErrorInfo(msgspec.Struct, frozen=True):
    """The inside of OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object: the body of every answer that is not 2xx."""

    error: ErrorInfo


class ApiError(Exception):
    """An error with its HTTP status; `param` names the request field at fault."""

    status = 500
    kind: ClassVar[str] = "server_error"
    retry_after_s: int | None = None
    """When trying again may help, for the Retry-After header."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        if status is not None:
            self.status = status

    def body(self) -> bytes:
        """The error object as JSON."""
        param = None if self.param is None else _printable(self.param, _MAX_PARAM)
        return msgspec.json.encode(
            ErrorBody(ErrorInfo(_printable(self.message, _MAX_MESSAGE), self.kind, param, self.code))
        )


class RequestError(ApiError, ValueError):
    """The request cannot be served as it stands."""

    status = 400
    kind = "invalid_request_error"


class OverloadedError(ApiError):
    """The queue is full. OpenAI's words for it: type requests, code rate_limit_exceeded."""

    status = 429
    kind = "requests"

    def __init__(self, message: str, retry_after_s: int):
        super().__init__(message, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s


class InternalError(ApiError):
    """Something that must not happen; what it was stands in the log only."""

    def __init__(self) -> None:
        super().__init__("internal error; the server's log has the details", code="internal_error")


class UnavailableError(ApiError):
    """No token can be made right now; trying again later may help."""

    status = 503
    retry_after_s = 2


class EngineError(ApiError):
    """The engine could not finish this request."""


class EngineDeadError(EngineError):
    """The engine ended; no request can be finished any more."""

    def __init__(self, reason: str):
        super().__init__(f"the engine is gone: {reason}", code="engine_dead")


def _printable(text: str, limit: int) -> str:
    """Text that JSON can carry: a request line may hold bytes that are no UTF-8."""
    clipped = text if len(text) <= limit else text[: limit - 1] + "…"
    return clipped.encode(errors="replace").decode()
