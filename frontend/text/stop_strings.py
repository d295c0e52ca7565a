"""Finds stop strings in a streamed text."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

__all__ = ["StopFinder"]


class StopFinder:
    """Finds the stop string that ends first in a streamed text.

    Of several that end at the same character it finds the longest. Only text that may become part
    of a stop string is held back.

    The work is linear in the text, whatever the stop strings: text that is held back is never searched
    again from its beginning.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]):
        self._stops = _prepared(tuple(stops))
        self._held = ""

    def feed(self, new_text: str) -> tuple[str, str | None]:
        """(text that can be returned, the stop string found or None)."""
        held = len(self._held)
        text = self._held + new_text
        if ends := self._stops.ends(text, held):
            _, at, stop = min(ends)
            self._held = ""
            return text[:at], stop
        safe = self._stops.first_possible(text)
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        """The text that is still held back."""
        held = self._held
        self._held = ""
        return held


class _StopStrings:
    """The stop strings of a request, which its sequences share."""

    __slots__ = ("_by_last", "_inner", "_sorted")

    def __init__(self, stops: tuple[str, ...]):
        self._sorted = sorted(stops)
        # Text that ends with another character does not end with the beginning of a stop string.
        self._inner = frozenset("".join(stop[:-1] for stop in stops))
        self._by_last: dict[str, list[str]] = {}
        for stop in stops:
            self._by_last.setdefault(stop[-1], []).append(stop)

    def ends(self, text: str, old: int) -> list[tuple[int, int, str]]:
        """(end, start, stop string) of each one that ends after the first `old` characters."""
        found = []
        for last in self._by_last.keys() & set(text[old:]):
            for stop in self._by_last[last]:
                at = text.find(stop, max(0, old - len(stop) + 1))
                if at >= 0:
                    found.append((at + len(stop), at, stop))
        return found

    def first_possible(self, text: str) -> int:
        """The first place from which on `text` begins a stop string; its length if there is none."""
        if text[-1:] not in self._inner:
            return len(text)
        return next((start for start in range(len(text)) if self._begins_one(text[start:])), len(text))

    def _begins_one(self, text: str) -> bool:
        # Strings that begin with `text` are next to each other in sorted order, from this place on.
        place = bisect_left(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


_prepared = lru_cache(maxsize=64)(_StopStrings)
