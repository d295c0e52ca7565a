"""Converts all exceptions to error objects without tracebacks: OpenAI's, or Anthropic's on its routes."""

import secrets

from aiohttp import web
from aiohttp.typedefs import Handler

from atom.shared.utils.logger import get_logger
from frontend.api.generation.caller import REQUEST_ID
from frontend.api.messages.errors import anthropic_error
from frontend.errors import ApiError, DeadlineError, InternalError, RequestError

__all__ = [
    "add_request_id",
    "client_request_id",
    "encoding_error",
    "error_middleware",
    "error_response",
    "http_exception_response",
]

_ANTHROPIC = "/v1/messages"
_REQUEST_ID = "X-Request-Id"
_VERSION = "/v1"
_OPENAPI = "/openapi.json"
# Longer paths are not compared with the routes, and cut in messages.
_MAX_PATH = 256


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert a handler's exceptions to error responses."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error, request.path)
    except web.HTTPNotFound:
        return error_response(await _unknown_path(request), request.path)
    except web.HTTPException as error:
        return http_exception_response(error, request.path)
    except Exception:
        get_logger().exception("%s %s failed", request.method, request.path)
        return error_response(InternalError(), request.path)


def error_response(error: ApiError, path: str = "") -> web.Response:
    """The response for `error` on `path`."""
    body = anthropic_error(error) if path.startswith(_ANTHROPIC) else error.body()
    response = web.Response(body=body, status=error.status, content_type="application/json")
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, DeadlineError):
        response.headers["X-Should-Retry"] = "false"  # the SDKs would send it again, with a new deadline
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def http_exception_response(error: web.HTTPException, path: str) -> web.Response:
    """The response for an exception raised by aiohttp itself."""
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            response = error_response(
                RequestError(f"{path} supports {allowed}, not {error.method}", status=405), path
            )
            response.headers["Allow"] = allowed
            return response
    return error_response(RequestError(error.reason, status=error.status), path)


def encoding_error() -> RequestError:
    """For a body in an encoding that this server does not decode."""
    return RequestError(
        "the Content-Encoding of the request body is not supported: send it plain, or in gzip or deflate",
        param="Content-Encoding",
    )


async def _unknown_path(request: web.Request) -> RequestError:
    """Names the path that was meant: clients have base URLs with a slash at the end, or without /v1."""
    path = "/" + "/".join(filter(None, request.path.split("/")))
    found = [each for each in (path, _VERSION + path) if await _is_served(request, each)]
    if found:
        hint = f": use {found[0]}"
    else:
        hint = f"; GET {_OPENAPI} lists the routes" if await _is_served(request, _OPENAPI) else ""
    return RequestError(f"unknown path {request.path:.{_MAX_PATH}}{hint}", status=404)


async def _is_served(request: web.Request, path: str) -> bool:
    if path == request.path or len(path) > _MAX_PATH:
        return False
    match = await request.app.router.resolve(request.clone(rel_url=path))
    return not isinstance(match.http_exception, web.HTTPNotFound)


def client_request_id(request: web.BaseRequest) -> str | None:
    """The X-Request-Id header, if it is valid (REQUEST_ID)."""
    given = request.headers.get(_REQUEST_ID, "")
    return given if REQUEST_ID.fullmatch(given) else None


async def add_request_id(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Set X-Request-Id on `response`: the client's id, or a new one."""
    response.headers.setdefault(_REQUEST_ID, client_request_id(request) or secrets.token_hex(16))
