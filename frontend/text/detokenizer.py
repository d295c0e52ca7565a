"""From the token ids of one sequence to its text."""

import codecs
from collections.abc import Sequence

from frontend.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "decode"]

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
