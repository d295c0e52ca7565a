"""From one choice's token ids to its text: incremental decoding, then stop strings."""

from collections.abc import Sequence

from frontend.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopFinder"]

# Ids that a restarted decoder reads first, so that the next token joins them as it should.
_CONTEXT = 8


class Detokenizer:
    """Decodes one token at a time; the pieces join to what decoding all ids at once gives.

    `ids` is the choice's record of tokens, to which its owner appends before each `feed`.
    """

    __slots__ = ("_given", "_holding", "_ids", "_skip_special", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._ids = ids
        self._skip_special = skip_special_tokens
        self._stream = tokenizer.stream((), skip_special_tokens)
        self._given = 0  # characters handed out
        self._holding = False  # ids at the end have no text yet

    def feed(self) -> str:
        """The text that the last id completes; empty inside a character of several tokens."""
        try:
            piece = self._tokenizer.step(self._stream, self._ids[-1])
        except Exception:  # tokenizers raises bare Exception
            piece = self._resume()
        if not piece:
            self._holding = True
            return ""
        self._holding = False
        self._given += len(piece)
        return piece

    def finish(self) -> str:
        """Whatever an incomplete character at the end decodes to."""
        if not self._holding:
            return ""
        self._holding = False
        return self._remainder()

    def _resume(self) -> str:
        # With byte-fallback vocabularies an invalid byte changes how the bytes before it decode,
        # which the stream refuses. What was handed out stays; the rest follows from its length.
        self._stream = self._tokenizer.stream(self._ids[-_CONTEXT:], self._skip_special)
        return self._remainder()

    def _remainder(self) -> str:
        return self._tokenizer.decode(self._ids, self._skip_special)[self._given :]


class StopFinder:
    """Finds the stop string whose last character comes first, wherever the pieces break.

    Among those that end at the same character the longest counts. Only text that may yet
    become part of a stop string is held back.
    """

    __slots__ = ("_held", "_inner", "_stops")

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        # Text whose last character is none of these holds no beginning of a stop string.
        self._inner = frozenset("".join(stop[:-1] for stop in stops))
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string found or None)."""
        text = self._held + piece
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, stop = min(ends)
            self._held = ""
            return text[:at], stop
        if text[-1:] not in self._inner:
            self._held = ""
            return text, None
        safe = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        """The text still held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
