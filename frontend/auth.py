"""API keys: who may use this server, and whose cached prompts a request may share."""

import hashlib
import hmac
from collections.abc import Mapping

from frontend.errors import RequestError

__all__ = ["ApiKeys"]

_SCHEME = "bearer "
_TENANT_DIGITS = 16


class ApiKeys:
    """The accepted keys, kept as digests only."""

    def __init__(self, configured: str | None):
        """`configured` holds keys with commas between; None asks for none. Raises ValueError."""
        keys = [] if configured is None else [key.strip() for key in configured.split(",")]
        if not all(keys):
            raise ValueError("--api-key: there is an empty key between the commas")
        self._digests = [_digest(key) for key in keys]

    def tenant(self, headers: Mapping[str, str]) -> str:
        """What stands for the request's key; "" where all callers share one key or need none.

        Raises RequestError (401) without a right key in `Authorization: Bearer` or `x-api-key`.
        """
        if not self._digests:
            return ""
        offered = _offered(headers)
        if not offered:
            raise _refusal("no API key: send it as 'Authorization: Bearer <key>' or as 'x-api-key'")
        found = [digest for key in offered for digest in self._known(_digest(key))]
        if not found:
            raise _refusal("the API key is not one of this server's")
        return found[0].hex()[:_TENANT_DIGITS] if len(self._digests) > 1 else ""

    def _known(self, offered: bytes) -> list[bytes]:
        # Every key is compared, in constant time: how long it takes tells nothing about any of them.
        return [known for known in self._digests if hmac.compare_digest(known, offered)]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _offered(headers: Mapping[str, str]) -> list[str]:
    """SDKs that know both headers send both, and one of them may hold a dummy."""
    keys = []
    authorization = headers.get("Authorization", "")
    if authorization[: len(_SCHEME)].lower() == _SCHEME:
        keys.append(authorization[len(_SCHEME) :].strip())
    if (key := headers.get("x-api-key")) is not None:
        keys.append(key.strip())
    return keys


def _refusal(message: str) -> RequestError:
    return RequestError(message, status=401, code="invalid_api_key")
