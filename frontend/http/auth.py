"""API keys: authentication, and the tenant whose cached prompts a request may share."""

import hashlib
import hmac
from collections.abc import Mapping

from frontend.errors import RequestError

__all__ = ["ApiKeys"]

_SCHEME = "bearer "
_TENANT_DIGITS = 16


class ApiKeys:
    """The accepted API keys, stored as digests."""

    def __init__(self, configured: str | None):
        """`configured` is a comma-separated list; None disables authentication. Raises ValueError."""
        keys = [] if configured is None else [key.strip() for key in configured.split(",")]
        if not all(keys):
            raise ValueError("--api-key has an empty key: write keys with single commas between them")
        self._digests = [_digest(key) for key in keys]

    @property
    def is_required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._digests)

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tenant id of the request's key; "" with at most one configured key.

        Raises RequestError (401) without a valid key in `Authorization: Bearer` or `x-api-key`.
        """
        if not self._digests:
            return ""
        sent = _sent_keys(headers)
        if not sent:
            raise _unauthorized("no API key: send it as 'Authorization: Bearer <key>' or as 'x-api-key'")
        found = [digest for key in sent for digest in self._matching(_digest(key))]
        if not found:
            raise _unauthorized("the API key is not one of this server's")
        return found[0].hex()[:_TENANT_DIGITS] if len(self._digests) > 1 else ""

    def _matching(self, sent: bytes) -> list[bytes]:
        # Comparing all keys in constant time leaks nothing through timing.
        return [digest for digest in self._digests if hmac.compare_digest(digest, sent)]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _sent_keys(headers: Mapping[str, str]) -> list[str]:
    """The keys in both headers: some SDKs send both, one of them with a dummy value."""
    keys = []
    authorization = headers.get("Authorization", "")
    if authorization[: len(_SCHEME)].lower() == _SCHEME:
        keys.append(authorization[len(_SCHEME) :].strip())
    if (key := headers.get("x-api-key")) is not None:
        keys.append(key.strip())
    return keys


def _unauthorized(message: str) -> RequestError:
    return RequestError(message, status=401, code="invalid_api_key")
