"""A bounded memory of what was seen lately."""

from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """Remembers at least the last `size` keys that were put, and at most twice as many."""

    __slots__ = ("_older", "_size", "_values")

    def __init__(self, size: int):
        self._size = size
        self._values: dict[bytes, V] = {}
        self._older: dict[bytes, V] = {}

    def put(self, key: bytes, value: V) -> None:
        """Remember `value` for `key`."""
        self._values[key] = value
        if len(self._values) >= self._size:
            self._older = self._values
            self._values = {}

    def get(self, key: bytes) -> V | None:
        """The last value of `key`; None if it is not remembered."""
        found = self._values.get(key)
        return self._older.get(key) if found is None else found
