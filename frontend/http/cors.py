"""Which web pages may call the server (CORS), by the settings that start with --allow."""

from collections.abc import Mapping

from atom.shared.config.server import ServerConfig
from frontend.errors import RequestError

__all__ = ["METHOD", "REQUESTED_HEADERS", "CorsPolicy"]

METHOD = "Access-Control-Request-Method"
REQUESTED_HEADERS = "Access-Control-Request-Headers"
# What a page may read of a response's headers, besides those that every page may.
_EXPOSED = "X-Request-Id, Retry-After, Server-Timing, WWW-Authenticate"
_ALL = "*"


class CorsPolicy:
    """The origins, methods and headers that are allowed."""

    def __init__(self, server: ServerConfig):
        """Raises ValueError for credentials without named origins."""
        self._origins = frozenset(server.allowed_origins.split(","))
        self._methods = frozenset(server.allowed_methods.upper().split(","))
        self._headers = frozenset(server.allowed_headers.lower().split(","))
        self._credentials = server.allow_credentials
        if self._credentials and _ALL in self._origins:
            raise ValueError(
                "--allow-credentials needs the origins by name: any web page could use the credentials of a "
                "browser otherwise; set --allowed-origins"
            )

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises RequestError (403) if the request announced by a preflight with `headers` is not allowed."""
        origin = headers["Origin"]
        method = headers[METHOD]
        if not self._allows(self._origins, origin):
            raise _refusal(f"the origin {origin}", "--allowed-origins")
        if not self._allows(self._methods, method.upper()):
            raise _refusal(f"the method {method}", "--allowed-methods")
        for name in headers.get(REQUESTED_HEADERS, "").split(","):
            if name.strip() and not self._allows(self._headers, name.strip().lower()):
                raise _refusal(f"the header {name.strip()}", "--allowed-headers")

    def response_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers that let the page at a request's Origin read the response."""
        origin = headers.get("Origin")
        if _ALL in self._origins:
            exposed = {"Access-Control-Allow-Origin": _ALL, "Access-Control-Expose-Headers": _EXPOSED}
            return {} if origin is None else exposed
        if origin not in self._origins:
            return {"Vary": "Origin"}  # a cache must not give this response to an allowed page
        allowed = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        if self._credentials:
            allowed["Access-Control-Allow-Credentials"] = "true"
        return allowed | {"Access-Control-Expose-Headers": _EXPOSED}

    @staticmethod
    def _allows(allowed: frozenset[str], asked: str) -> bool:
        return _ALL in allowed or asked in allowed


def _refusal(what: str, flag: str) -> RequestError:
    return RequestError(f"{what} is not allowed: start the server with it in {flag}", status=403, code="cors")
