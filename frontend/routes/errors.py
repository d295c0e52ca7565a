"""Every failure leaves as OpenAI's error object, and none with a traceback."""

import secrets

from aiohttp import web
from aiohttp.typedefs import Handler

from atom.utils.logger import get_logger
from frontend.errors import ApiError, InternalError, RequestError
from frontend.serving.caller import REQUEST_ID

__all__ = [
    "answer_of",
    "client_request_id",
    "error_middleware",
    "name_answer",
    "of_aiohttp",
]

_REQUEST_ID = "X-Request-Id"


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions of the handlers below into answers."""
    try:
        return await handler(request)
    except ApiError as error:
        return answer_of(error)
    except web.HTTPException as error:
        return of_aiohttp(error, request.path, request.client_max_size)
    except Exception:
        get_logger().exception("%s %s failed", request.method, request.path)
        return answer_of(InternalError())


def answer_of(error: ApiError) -> web.Response:
    """The answer that says `error`."""
    response = web.Response(body=error.body(), status=error.status, content_type="application/json")
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def of_aiohttp(error: web.HTTPException, path: str, max_body_bytes: int) -> web.Response:
    """What aiohttp itself has to say about a request for `path`."""
    match error:
        case web.HTTPNotFound():
            return answer_of(RequestError(f"there is no route {path}", status=404))
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            response = answer_of(RequestError(f"{path} takes {allowed}, not {error.method}", status=405))
            response.headers["Allow"] = allowed
            return response
        case web.HTTPRequestEntityTooLarge():
            return answer_of(RequestError(f"the request body exceeds {max_body_bytes} bytes", status=413))
    return answer_of(RequestError(error.reason, status=error.status))


def client_request_id(request: web.BaseRequest) -> str | None:
    """The client's own name for its request, if it can go into a header and a log as it is."""
    given = request.headers.get(_REQUEST_ID, "")
    return given if REQUEST_ID.fullmatch(given) else None


async def name_answer(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Every answer carries its request's name, so that both sides' logs can be brought together."""
    response.headers.setdefault(_REQUEST_ID, client_request_id(request) or secrets.token_hex(16))
