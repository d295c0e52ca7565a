"""From the token ids of one sequence to its text: incremental decoding, then stop strings."""

import codecs
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from frontend.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopFinder", "decode"]

_REPLACEMENT = "\ufffd"
_EACH_BYTE = "atom-replace-each-byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class Detokenizer:
    """Decodes one token at a time, at a cost that does not depend on the tokens before it.

    The joined texts equal the tokenizer library's decoding of all ids at once, with one exception:
    next to an invalid byte token the library replaces valid byte tokens too.
    """

    __slots__ = ("_errors", "_last", "_pending", "_skipped", "_strip", "_stripped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._errors = "replace" if tokenizer.is_byte_level else _EACH_BYTE
        self._stripped, self._strip = tokenizer.leading_strip
        """The character to remove at the beginning, and how many of it at most."""
        self._pending = b""
        """The bytes of an incomplete character."""
        self._last: int | None = None

    def feed(self, token_id: int) -> str:
        """The text that `token_id` completes; empty inside a character of several tokens."""
        piece = None if token_id in self._skipped else self._tokenizer.piece(token_id)
        if piece is None:
            return ""
        last = self._last
        self._last = token_id
        if isinstance(piece, bytes):
            data = self._pending + piece
            text, used = codecs.utf_8_decode(data, self._errors, False)
            self._pending = data[used:]
        else:
            text = self.finish() + self._text(last, token_id, piece)
        return self._without_leading(text) if self._strip else text

    def finish(self) -> str:
        """Replacement characters for an incomplete character at the end."""
        rest = self._pending
        self._pending = b""
        return rest.decode("utf-8", self._errors)

    def _text(self, last: int | None, token_id: int, piece: str) -> str:
        if last is None and not self._strip:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        if last is None or self._tokenizer.joins_pieces:
            return piece
        return self._tokenizer.text_after(last, token_id)

    def _without_leading(self, text: str) -> str:
        while self._strip and text.startswith(self._stripped):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text


def decode(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text of `ids`, equal to the joined texts of a Detokenizer."""
    text = tokenizer.decode(ids, skip_special_tokens)
    if tokenizer.is_byte_level or _REPLACEMENT not in text:
        return text
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return "".join([*map(detokenizer.feed, ids), detokenizer.finish()])


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
