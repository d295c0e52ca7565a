"""Every failure leaves as OpenAI's error object, and none with a traceback."""

from aiohttp import web
from aiohttp.typedefs import Handler

from atom.utils.logger import get_logger
from frontend.errors import ApiError, RequestError, UnavailableError
from frontend.routes.health import RETRY_AFTER_S

__all__ = ["error_middleware"]


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions of the handlers below into answers."""
    try:
        return await handler(request)
    except ApiError as error:
        return _answer(error)
    except web.HTTPException as error:
        return _from_aiohttp(request, error)
    except Exception:
        get_logger().exception("%s %s failed", request.method, request.path)
        return _answer(ApiError("internal error; the server's log has the details", code="internal_error"))


def _answer(error: ApiError) -> web.Response:
    response = web.Response(body=error.body(), status=error.status, content_type="application/json")
    if isinstance(error, UnavailableError):
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def _from_aiohttp(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    match error:
        case web.HTTPNotFound():
            return _answer(RequestError(f"there is no route {request.path}", status=404))
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            text = f"{request.path} takes {allowed}, not {error.method}"
            response = _answer(RequestError(text, status=405))
            response.headers["Allow"] = allowed
            return response
        case web.HTTPRequestEntityTooLarge():
            text = f"the request body exceeds {request.client_max_size} bytes"
            return _answer(RequestError(text, status=413))
    return _answer(RequestError(error.reason, status=error.status))
