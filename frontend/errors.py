"""What can go wrong with a request, and how the client reads it.

ApiError                 one answer with OpenAI's error object
├─ RequestError          the client's doing: 400, 404, 408, 413 (a ValueError for the library)
├─ UnavailableError      503 with Retry-After: starting or stopping
└─ EngineError           500: the engine failed this request
   └─ EngineDeadError    the engine is gone; code engine_dead
"""

import msgspec


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
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return msgspec.json.encode(ErrorBody(ErrorInfo(self.message, kind, self.param, self.code)))


class RequestError(ApiError, ValueError):
    """The request cannot be served as it stands."""

    status = 400


class UnavailableError(ApiError):
    """No token can be made right now; trying again later may help."""

    status = 503


class EngineError(ApiError):
    """The engine could not finish this request."""


class EngineDeadError(EngineError):
    """The engine ended; no request can be finished any more."""

    def __init__(self, reason: str):
        super().__init__(f"the engine is gone: {reason}", code="engine_dead")
