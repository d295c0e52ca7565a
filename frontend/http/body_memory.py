"""The memory of request bodies."""

from frontend.errors import OverloadedError

__all__ = ["BodyMemory"]

_RETRY_AFTER_S = 1


class BodyMemory:
    """Bounds the bytes of all request bodies that are being received or parsed."""

    def __init__(self, limit: int):
        self.used = 0
        self._limit = limit

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes; raises OverloadedError above the limit."""
        if self.used + size > self._limit:
            raise OverloadedError(
                f"the server is receiving request bodies of {self._limit} bytes already; try again later",
                _RETRY_AFTER_S,
            )
        self.used += size

    def release(self, size: int) -> None:
        """Release `size` bytes."""
        self.used -= size
