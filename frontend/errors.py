"""The exceptions that become OpenAI error objects.

ApiError                 base: an HTTP status and OpenAI's error object
├─ RequestError          the request is at fault: 400, 401, 403, 404, 408, 413 (also a ValueError)
│  ├─ DeadlineError      408: no token before the request's own deadline; code timeout
│  └─ ResumedElsewhereError  an error event: another connection has the stream; code stream_resumed
├─ OverloadedError       429 with Retry-After: the queue is full
├─ InternalError         500: a bug in this program
├─ UnavailableError      503 with Retry-After: starting, stopping or without an engine
└─ EngineError           500: the engine failed this request
   └─ EngineLostError    the engine ended while it ran the request; code engine_dead
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from atom.shared.messages.resume import RESUMED_ELSEWHERE

# Error messages quote the request; longer ones are cut.
_MAX_MESSAGE = 2000
_MAX_PARAM = 200


class ErrorInfo(msgspec.Struct, frozen=True):
    """The `error` member of OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object: the body of every response that is not 2xx."""

    error: ErrorInfo


class ApiError(Exception):
    """An error with its HTTP status; `param` names the request field at fault."""

    status = 500
    kind: ClassVar[str] = "server_error"
    retry_after_s: int | None = None
    """Value of the Retry-After header, in seconds."""

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
        param = None if self.param is None else printable(self.param, _MAX_PARAM)
        return msgspec.json.encode(ErrorBody(ErrorInfo(printable(self.message), self.kind, param, self.code)))


class RequestError(ApiError, ValueError):
    """The request is invalid."""

    status = 400
    kind = "invalid_request_error"

    def rename_field(self, names: Mapping[str, str]) -> None:
        """Name the field at fault as its endpoint does, where that has another name for it or what it is in.

        The message has names of one word in quotes only; those with an underscore may stand without.
        """
        field = self.param
        if field is None:
            return
        outer = field
        while outer not in names:
            outer, dot, _ = outer.rpartition(".")
            if not dot:
                return
        name = names[outer] + field.removeprefix(outer)
        quote = "" if "_" in field else "'"
        self.message = self.message.replace(f"{quote}{field}{quote}", f"{quote}{name}{quote}")
        self.param = name


class ResumedElsewhereError(RequestError):
    """A client goes on with this stream on another connection."""

    def __init__(self) -> None:
        super().__init__(RESUMED_ELSEWHERE, code="stream_resumed")


class DeadlineError(RequestError):
    """The request's own deadline has passed before its first token; clients must not send it again."""

    status = 408

    def __init__(self, timeout_s: float):
        super().__init__(
            f"the request had no token after its timeout of {timeout_s:g} s", param="timeout", code="timeout"
        )


class OverloadedError(ApiError):
    """The queue is full. OpenAI uses type requests and code rate_limit_exceeded."""

    status = 429
    kind = "requests"

    def __init__(self, message: str, retry_after_s: int):
        super().__init__(message, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s


class InternalError(ApiError):
    """A bug; only the log has its details."""

    def __init__(self) -> None:
        super().__init__("internal error; the server's log has the details", code="internal_error")


class UnavailableError(ApiError):
    """The server cannot generate tokens now; a later retry may succeed."""

    status = 503
    retry_after_s = 2


class EngineError(ApiError):
    """The engine could not finish this request."""


class EngineLostError(EngineError):
    """The engine ended while it ran the request."""

    def __init__(self, reason: str):
        super().__init__(f"the engine is gone: {reason}", code="engine_dead")


def printable(text: str, limit: int = _MAX_MESSAGE) -> str:
    """`text` cut to `limit` characters; surrogates, from request lines that are not UTF-8, are replaced."""
    clipped = text if len(text) <= limit else text[: limit - 1] + "…"
    return clipped.encode(errors="replace").decode()
