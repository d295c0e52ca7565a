"""From the core's token columns to text and ends, for many requests at once.

It does no input or output: the HTTP frontend and the synchronous library share it. Its table
of live requests is the record that a replay needs: what was asked and every id emitted since.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from atom.messages.engine import AddRequest, Finished, FinishReason, TokenDeltas, unpack_ids
from frontend.detokenizer import Detokenizer, StopFinder
from frontend.tokenizer import Tokenizer

__all__ = ["Live", "OutputProcessor", "Processed", "Update"]

_RAW_REASONS = {
    FinishReason.EOS: "eos",
    FinishReason.MAX_TOKENS: "max_tokens",
    FinishReason.ABORTED: "aborted",
    FinishReason.ERROR: "error",
    FinishReason.STOP_STRING: "stop_sequence",
}


@dataclass(slots=True)
class Update:
    """What is new about one choice."""

    request_id: int
    token_ids: "array[int]"
    """The new ids, with the one that ended the choice."""
    text: str = ""
    """The new text, without end-of-sequence and stop strings."""
    finished: bool = False
    reason: str | None = None
    """Why it ended: eos, stop_<id>, stop_sequence, max_tokens, aborted or error."""
    stop_reason: str | None = None
    """The stop string that ended it."""
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache; comes with the first token."""
    error: str = ""
    """What went wrong, where `reason` is error."""

    def merge(self, later: "Update") -> None:
        """Append what came after this update."""
        self.token_ids.extend(later.token_ids)
        self.text += later.text
        self.cached_tokens += later.cached_tokens
        self.finished = later.finished
        self.reason = later.reason
        self.stop_reason = later.stop_reason
        self.error = later.error


@dataclass(slots=True)
class Processed:
    """The outcome of one step."""

    updates: list[Update] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    """Choices that ended on a stop string, which the core must still be told."""


@dataclass(slots=True)
class Live:
    """One choice in progress: what was asked, and all ids since."""

    request: AddRequest
    emitted: "array[int]"
    detokenizer: Detokenizer | None
    stops: StopFinder | None

    def advance(self, ids: "array[int]") -> tuple[str, int, str | None]:
        """Take new ids: (text to show, ids used, stop string that was completed).

        Ids behind a completed stop string are not used.
        """
        if self.detokenizer is None:
            self.emitted.extend(ids)
            return "", len(ids), None
        shown = ""
        for used, token_id in enumerate(ids, 1):
            self.emitted.append(token_id)
            piece, stop = self._past_stops(self.detokenizer.feed())
            shown += piece
            if stop is not None:
                return shown, used, stop
        return shown, len(ids), None

    def finish(self) -> tuple[str, str | None]:
        """The text held back so far, and the stop string in it."""
        if self.detokenizer is None:
            return "", None
        piece, stop = self._past_stops(self.detokenizer.finish())
        if stop is None and self.stops is not None:
            piece += self.stops.finish()
        return piece, stop

    def _past_stops(self, piece: str) -> tuple[str, str | None]:
        if self.stops is None or not piece:
            return piece, None
        return self.stops.feed(piece)


class OutputProcessor:
    """Owns every live choice. Without a tokenizer updates carry ids and no text."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._live: dict[int, Live] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: AddRequest, stop_strings: list[str]) -> None:
        """Follow `request` from now on."""
        emitted = array("i")
        detokenizer = Detokenizer(self._tokenizer, emitted) if self._tokenizer else None
        stops = StopFinder(stop_strings) if stop_strings else None
        self._live[request.request_id] = Live(request, emitted, detokenizer, stops)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop these choices; what still comes for them is ignored."""
        for request_id in request_ids:
            self._live.pop(request_id, None)

    def live(self) -> list[Live]:
        """The record of every choice in progress."""
        return list(self._live.values())

    def process(self, deltas: TokenDeltas) -> Processed:
        """Take in one step. Tokens of choices that ended or were forgotten are ignored."""
        done = Processed()
        ids = unpack_ids(deltas.token_ids)
        ends = {end.request_id: end for end in deltas.finished}
        cached = {first.request_id: first.cached_tokens for first in deltas.first}
        start = 0
        for row, request_id in enumerate(deltas.request_ids):
            stop = start + (deltas.counts[row] if deltas.counts else 1)
            end = ends.pop(request_id, None)
            self._advance(done, request_id, ids[start:stop], end, cached.get(request_id, 0))
            start = stop
        for request_id, end in ends.items():
            self._advance(done, request_id, array("i"), end, 0)
        return done

    def _advance(
        self, done: Processed, request_id: int, ids: "array[int]", end: Finished | None, cached: int
    ) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        text, used, stop_string = live.advance(_without_end(ids, end))
        if stop_string is not None:
            update = Update(request_id, ids[:used], text, cached_tokens=cached)
            self._end_on_string(done, update, stop_string, told=end is not None)
            return
        update = Update(request_id, ids, text, cached_tokens=cached)
        if end is not None:
            self._end(done, update, live, end)
        else:
            done.updates.append(update)

    def _end(self, done: Processed, update: Update, live: Live, end: Finished) -> None:
        tail, stop_string = live.finish()
        update.text += tail
        if stop_string is not None:
            self._end_on_string(done, update, stop_string, told=True)
            return
        update.finished, update.reason, update.error = True, _raw_reason(end), end.message
        del self._live[update.request_id]
        done.updates.append(update)

    def _end_on_string(self, done: Processed, update: Update, stop: str, told: bool) -> None:
        update.finished, update.stop_reason = True, stop
        update.reason = _RAW_REASONS[FinishReason.STOP_STRING]
        del self._live[update.request_id]
        done.updates.append(update)
        if not told:
            done.aborts.append(update.request_id)


def _without_end(ids: "array[int]", end: Finished | None) -> "array[int]":
    """The ids that become text: all but the end-of-sequence or stop id."""
    ended_by_id = end is not None and end.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
    return ids[:-1] if ended_by_id else ids


def _raw_reason(end: Finished) -> str:
    if end.reason is FinishReason.STOP_TOKEN:
        return f"stop_{end.stop_token_id}"
    return _RAW_REASONS[end.reason]
