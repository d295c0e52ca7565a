"""Responses that are kept for `previous_response_id` and GET /v1/responses/{id}, bounded in bytes."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from frontend.errors import RequestError

__all__ = ["ResponseStore", "StoredResponse", "joined_lists"]

# About what the objects of an entry take in addition to its bytes.
_ENTRY_BYTES = 1024


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the conversation that it ends."""

    body: bytes
    """The response as JSON."""
    items: bytes
    """All items of the conversation, with those of the response, as a JSON list."""

    @property
    def size(self) -> int:
        """Bytes in memory, about."""
        return len(self.body) + len(self.items) + _ENTRY_BYTES


def joined_lists(*lists: bytes) -> bytes:
    """JSON lists as one; each has no white space around it."""
    return b"[%b]" % b",".join(each[1:-1] for each in lists if each != b"[]")


class ResponseStore:
    """The responses of this process, least recently used ones first. Any thread may use it."""

    def __init__(self, max_bytes: int, num_frontends: int = 1):
        self._max_bytes = max_bytes if num_frontends == 1 else 0
        self._num_frontends = num_frontends
        self._bytes = 0
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether responses are kept at all."""
        return self._max_bytes > 0

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Keep `response` for clients of `tenant`; the oldest ones make room. A too large one is dropped."""
        if response.size > self._max_bytes:
            return
        with self._lock:
            self._remove(tenant, response_id)
            self._responses[tenant, response_id] = response
            self._bytes += response.size
            while self._bytes > self._max_bytes:
                _, oldest = self._responses.popitem(last=False)
                self._bytes -= oldest.size

    def get(self, tenant: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises RequestError: 404 for an unknown response, 400 where none are kept."""
        response = self.find(tenant, response_id, param)
        if response is None:
            raise _unknown(response_id, param)
        return response

    def find(self, tenant: str, response_id: str, param: str | None = None) -> StoredResponse | None:
        """None for an unknown response. Raises RequestError where none are kept."""
        self._check_is_on(param)
        with self._lock:
            response = self._responses.get((tenant, response_id))
            if response is not None:
                self._responses.move_to_end((tenant, response_id))
        return response

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises RequestError as `get` does."""
        self._check_is_on(None)
        with self._lock:
            if not self._remove(tenant, response_id):
                raise _unknown(response_id, None)

    def _remove(self, tenant: str, response_id: str) -> bool:
        found = self._responses.pop((tenant, response_id), None)
        self._bytes -= 0 if found is None else found.size
        return found is not None

    def _check_is_on(self, param: str | None) -> None:
        if self._num_frontends > 1:
            raise RequestError(
                f"this server has {self._num_frontends} HTTP processes, which do not know one another's "
                "responses: send the whole conversation as 'input', or start the server with "
                "--api-server-count 1",
                param=param,
                code="unsupported_parameter",
            )
        if not self.is_on:
            raise RequestError(
                "this server keeps no responses: send the whole conversation as 'input', or start the "
                "server with a larger --max-stored-response-bytes",
                param=param,
                code="unsupported_parameter",
            )


def _unknown(response_id: str, param: str | None) -> RequestError:
    return RequestError(
        f"the response {response_id!r:.140} is not stored, or no longer: this server keeps the latest ones, "
        "until it is restarted; send the whole conversation as 'input'",
        param=param,
        status=404,
        code="response_not_found",
    )
