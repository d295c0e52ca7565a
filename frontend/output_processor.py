"""From the core's token columns to text and ends, for many requests at once.

It does no input or output: the HTTP frontend and the synchronous library share it. Its table
of live requests is the record that a replay needs: what was asked and every id emitted since.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from atom.messages.engine import (
    AddRequest,
    Finished,
    FinishReason,
    SampledLogprobs,
    TokenDeltas,
    unpack_ids,
)
from frontend.detokenizer import Detokenizer, StopFinder
from frontend.harmony import Harmony
from frontend.token_logprobs import LogprobColumns, LogprobTrack, PromptRecord, TokenLogprob
from frontend.tokenizer import Tokenizer

__all__ = ["OutputProcessor", "Processed", "RequestState", "TextOptions", "Update"]

_RAW_REASONS = {
    FinishReason.EOS: "eos",
    FinishReason.MAX_TOKENS: "max_tokens",
    FinishReason.ABORTED: "aborted",
    FinishReason.ERROR: "error",
    FinishReason.STOP_STRING: "stop_sequence",
}


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the ids of a request become its text."""

    stop_strings: Sequence[str] = ()
    include_stop: bool = False
    """Keep the stop string, or the text of the id, that ended the choice."""
    skip_special_tokens: bool = True
    format: Harmony | None = None
    """Tells reasoning from text; None: all is text."""


class Update(msgspec.Struct, gc=False):
    """What is new about one choice. There is one for every token, so it is cheap to make."""

    request_id: int
    token_ids: "array[int]"
    """The new ids, with the one that ended the choice."""
    text: str = ""
    """The new text, without what ended the choice unless it was asked for."""
    finished: bool = False
    reason: str | None = None
    """Why it ended: eos, stop_<id>, stop_sequence, max_tokens, aborted or error."""
    stop_reason: str | None = None
    """The stop string that ended it."""
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache; comes with the first token."""
    error: str = ""
    """What went wrong, where `reason` is error."""
    logprobs: list[TokenLogprob] | tuple[()] = ()
    """Of the tokens whose text is in `text` and, at the end, of all that are left: those of a
    stop string and the id that ended the choice have one, shown or not."""
    prompt_logprobs: list[TokenLogprob] | tuple[()] = ()
    """Of the prompt from its second token on; comes with the first token."""
    reasoning: str = ""
    """The new text that led to `text`, where the model's format tells them apart."""

    def merge(self, later: "Update") -> None:
        """Append what came after this update."""
        self.token_ids.extend(later.token_ids)
        self.text += later.text
        self.reasoning += later.reasoning
        self.cached_tokens += later.cached_tokens
        self.finished = later.finished
        self.reason = later.reason
        self.stop_reason = later.stop_reason
        self.error = later.error
        if isinstance(self.logprobs, list):
            self.logprobs.extend(later.logprobs)
        else:
            self.logprobs = later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs


@dataclass(slots=True)
class Processed:
    """The outcome of one step."""

    updates: list[Update] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    """Choices that ended on a stop string, which the core must still be told."""


class Advanced(NamedTuple):
    """What new ids brought."""

    text: str
    reasoning: str
    used: int
    """How many of the ids."""
    stop: str | None
    """The stop string that was completed; reasoning completes none."""


class RequestState:
    """One choice in progress: what was asked, and all ids since."""

    __slots__ = (
        "_channels",
        "_checked_from",
        "_detokenizer",
        "_include_stop",
        "_stops",
        "emitted",
        "ids_alone",
        "prompt",
        "request",
        "track",
    )

    def __init__(self, request: AddRequest, tokenizer: Tokenizer | None, text: TextOptions):
        sampling = request.sampling
        self.request = request
        self.emitted: array[int] = array("i")
        self.track = LogprobTrack() if sampling.logprobs >= 0 else None
        self.prompt = PromptRecord(request.prompt_logprobs, {}) if request.prompt_logprobs >= 0 else None
        self._include_stop = text.include_stop
        self._checked_from = sampling.logits_processors.min_tokens if sampling.logits_processors else 0
        self._stops = StopFinder(text.stop_strings) if text.stop_strings else None
        self._channels = text.format.channels() if text.format else None
        self._detokenizer = (
            Detokenizer(tokenizer, self.emitted, text.skip_special_tokens) if tokenizer else None
        )
        self.ids_alone = not (self._detokenizer or self.track or self.prompt)
        """Its updates carry neither text nor log probabilities."""

    def advance(self, ids: "array[int]", logprobs: Sequence[TokenLogprob] = ()) -> "Advanced":
        """Take new ids.

        Ids behind a completed stop string are not used. `logprobs` has one entry an id where
        the request asks for them, and is empty elsewhere.
        """
        if self._detokenizer is None:
            self.emitted.extend(ids)
            for entry in logprobs[: len(ids)]:
                self._track().place(entry, 0)
            return Advanced("", "", len(ids), None)
        shown = reasoning = ""
        for used, token_id in enumerate(ids, 1):
            self.emitted.append(token_id)
            decoded, thought = self._detokenizer.feed(), ""
            if self._channels is not None:
                decoded, thought = self._channels.sort(token_id, decoded)
                reasoning += thought
            if logprobs:
                self._track().place(logprobs[used - 1], len(decoded) + len(thought))
            piece, stop = self._past_stops(decoded)
            shown += piece
            if stop is not None:
                return Advanced(shown, reasoning, used, stop)
        return Advanced(shown, reasoning, len(ids), None)

    def finish(self) -> "Advanced":
        """What was held back so far."""
        if self._detokenizer is None:
            return Advanced("", "", 0, None)
        decoded, thought = self._detokenizer.finish(), ""
        if self._channels is not None:
            decoded, thought = self._channels.rest(decoded)
        piece, stop = self._past_stops(decoded)
        if stop is None and self._stops is not None:
            piece += self._stops.finish()
        return Advanced(piece, thought, 0, stop)

    def shown_ids(self, ids: "array[int]", end: Finished | None) -> "array[int]":
        """The ids that become text: without the one that ended the choice, unless it is to stay."""
        ended_by_id = end is not None and end.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        return ids[:-1] if ended_by_id and not self._include_stop else ids

    def shown_logprobs(
        self, characters: int, unplaced: Sequence[TokenLogprob], finished: bool
    ) -> list[TokenLogprob]:
        """What goes with `characters` of shown text; `unplaced` tokens have no text at all."""
        track = self._track()
        for entry in unplaced:
            track.place(entry, 0)
        if finished or self._detokenizer is None:
            return track.finish()
        return track.release(characters)

    def _track(self) -> LogprobTrack:
        assert self.track is not None
        return self.track

    def _past_stops(self, piece: str) -> tuple[str, str | None]:
        # Text of the first min_tokens tokens ends nothing, and begins no stop string either.
        if self._stops is None or not piece:
            return piece, None
        if self._checked_from and len(self.emitted) <= self._checked_from:
            return piece, None
        shown, stop = self._stops.feed(piece)
        return (shown + stop if stop is not None and self._include_stop else shown), stop


class OutputProcessor:
    """Owns every live choice. Without a tokenizer updates carry ids and no text."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._live: dict[int, RequestState] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: AddRequest, text: TextOptions) -> None:
        """Follow `request` from now on."""
        self._live[request.request_id] = RequestState(request, self._tokenizer, text)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop these choices; what still comes for them is ignored."""
        for request_id in request_ids:
            self._live.pop(request_id, None)

    def live(self) -> list[RequestState]:
        """The record of every choice in progress."""
        return list(self._live.values())

    def process(self, deltas: TokenDeltas) -> Processed:
        """Take in one step. Tokens of choices that ended or were forgotten are ignored."""
        done = Processed()
        ids = unpack_ids(deltas.token_ids)
        ends = {end.request_id: end for end in deltas.finished}
        cached = {first.request_id: first.cached_tokens for first in deltas.first}
        drawn = _Drawn(deltas.logprobs) if deltas.logprobs is not None else None
        self._take_prompts(deltas)
        start = 0
        for row, request_id in enumerate(deltas.request_ids):
            stop = start + (deltas.counts[row] if deltas.counts else 1)
            if (live := self._live.get(request_id)) is not None:
                update = Update(request_id, ids[start:stop], cached_tokens=cached.get(request_id, 0))
                end = ends.pop(request_id, None)
                if live.ids_alone and end is None:
                    live.emitted.extend(update.token_ids)
                    done.updates.append(update)
                else:
                    logprobs = drawn.entries(live, start, stop) if drawn is not None and live.track else ()
                    self._advance(done, live, update, end, logprobs)
            start = stop
        for request_id, end in ends.items():
            if (live := self._live.get(request_id)) is not None:
                self._advance(done, live, Update(request_id, array("i")), end)
        return done

    def _take_prompts(self, deltas: TokenDeltas) -> None:
        for piece in deltas.prompt_logprobs:
            live = self._live.get(piece.owner)
            if live is not None and live.prompt is not None:
                live.prompt.take(piece)

    def _advance(
        self,
        done: Processed,
        live: RequestState,
        update: Update,
        end: Finished | None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        ids = update.token_ids
        if live.prompt is not None and ids:
            update.prompt_logprobs, live.prompt = live.prompt.finish(), None
        update.text, update.reasoning, used, stop_string = live.advance(live.shown_ids(ids, end), logprobs)
        unplaced = logprobs[used:]
        if stop_string is not None:
            update.token_ids, unplaced = ids[:used], ()
        elif end is not None:
            tail = live.finish()
            update.text += tail.text
            update.reasoning += tail.reasoning
            stop_string = tail.stop
        if stop_string is not None:
            self._end_on_string(done, update, stop_string, told=end is not None)
        elif end is not None:
            update.finished, update.reason, update.error = True, _raw_reason(end), end.message
            del self._live[update.request_id]
        if live.track is not None:
            shown = len(update.text) + len(update.reasoning)
            update.logprobs = live.shown_logprobs(shown, unplaced, update.finished)
        done.updates.append(update)

    def _end_on_string(self, done: Processed, update: Update, stop: str, told: bool) -> None:
        update.finished, update.stop_reason = True, stop
        update.reason = _RAW_REASONS[FinishReason.STOP_STRING]
        del self._live[update.request_id]
        if not told:
            done.aborts.append(update.request_id)


class _Drawn:
    """Finds the log probabilities of one step's drawn tokens."""

    def __init__(self, drawn: SampledLogprobs):
        self._columns = LogprobColumns(drawn.table)
        self._row_of = {draw: row for row, draw in enumerate(drawn.indices)}

    def entries(self, live: RequestState, start: int, stop: int) -> list[TokenLogprob]:
        top = live.request.sampling.logprobs
        return [self._columns.row(self._row_of[draw], top) for draw in range(start, stop)]


def _raw_reason(end: Finished) -> str:
    if end.reason is FinishReason.STOP_TOKEN:
        return f"stop_{end.stop_token_id}"
    return _RAW_REASONS[end.reason]
