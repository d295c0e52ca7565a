"""Turns the engine core's tokens into text and finish reasons, for all requests of a step.

It does no I/O: the HTTP frontend and the library share it.
"""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from atom.shared.messages.engine import (
    AddRequest,
    Finished,
    FinishReason,
    SampledLogprobs,
    TokenDeltas,
    unpack_ids,
)
from atom.shared.messages.kv_peers import LeasedBlocks
from atom.shared.messages.resume import EndedSequence
from atom.shared.utils.logger import get_logger
from frontend.text.detokenizer import Detokenizer
from frontend.text.reply_formats.base import CallDelta, ReplyDelta, ReplyParser, call_characters, merge_calls
from frontend.text.stop_strings import StopFinder
from frontend.text.token_logprobs import (
    LogprobColumns,
    LogprobRow,
    LogprobTrack,
    PackedLogprobs,
    PromptLogprobTrack,
)
from frontend.text.tokenizer import Tokenizer

__all__ = [
    "OVERLOADED",
    "HasState",
    "OutputProcessor",
    "Processed",
    "RequestState",
    "SequenceOutput",
    "TextOptions",
    "end_of",
    "ended_update",
]

OVERLOADED = "overloaded"
"""The raw reason of a sequence that has waited in the queue for too long."""
_RAW_REASONS = {
    FinishReason.EOS: "eos",
    FinishReason.MAX_TOKENS: "max_tokens",
    FinishReason.ABORTED: "aborted",
    FinishReason.ERROR: "error",
    FinishReason.REFUSED: "error",
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.TIMEOUT: "timeout",
    FinishReason.OVERLOADED: OVERLOADED,
}
_REASONS = {
    raw: reason for reason, raw in reversed(_RAW_REASONS.items()) if reason is not FinishReason.REFUSED
}
_STOP_PREFIX = "stop_"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the text of a request is made from its ids."""

    stop_strings: Sequence[str] = ()
    include_stop: bool = False
    """Keep the stop string, or the text of the stop token."""
    skip_special_tokens: bool = True
    reply: Callable[[], ReplyParser] | None = None
    """Makes a parser for each sequence, which finds reasoning and tool calls; None: all text is content."""


class SequenceOutput(msgspec.Struct, gc=False):
    """New tokens and text of one sequence."""

    request_id: int
    token_ids: "array[int]"
    """The new ids, including the stop token."""
    text: str = ""
    """The new text, without stop string or stop token unless `include_stop` is set."""
    finished: bool = False
    reason: str | None = None
    """Why it finished: eos, stop_<id>, stop_sequence, max_tokens, aborted, timeout or error."""
    stop_reason: str | int | None = None
    """The stop string, or the id of `stop_token_ids`, that ended it."""
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache; set with the first token."""
    error: str = ""
    """The error message, where `reason` is error."""
    is_refused: bool = False
    """With an error: whether the request itself is the cause."""
    logprobs: PackedLogprobs | tuple[()] = ()
    """Entries of the tokens whose text is in `text`; the last update has all that remain, including
    those of the stop string or stop token."""
    prompt_logprobs: PromptLogprobTrack | tuple[()] = ()
    """Entries of the prompt from its second token on; set with the first token."""
    reasoning: str = ""
    """The new reasoning text, where the model's format separates it."""
    calls: list[CallDelta] | tuple[()] = ()
    """New tool calls, and more of their arguments."""
    called: bool = False
    """Set with the end: whether there were tool calls."""
    num_reasoning: int = 0
    """Those of the new ids that are reasoning, up to the last one whose text is known."""
    num_proposed: int = 0
    """Draft tokens that were verified."""
    num_accepted: int = 0
    """Those of them that are among `token_ids`."""
    leased: LeasedBlocks | None = None
    """Set with the end: what the engine keeps of the prompt for another server."""

    def merge(self, later: "SequenceOutput") -> None:
        """Append the following update to this one."""
        self.token_ids.extend(later.token_ids)
        self.text += later.text
        self.reasoning += later.reasoning
        if later.calls:
            if isinstance(self.calls, list):
                merge_calls(self.calls, later.calls)
            else:
                self.calls = later.calls
        self.called = later.called
        self.cached_tokens += later.cached_tokens
        self.num_reasoning += later.num_reasoning
        self.num_proposed += later.num_proposed
        self.num_accepted += later.num_accepted
        self.finished = later.finished
        self.reason = later.reason
        self.stop_reason = later.stop_reason
        self.error = later.error
        self.is_refused = later.is_refused
        self.leased = later.leased
        if self.logprobs and later.logprobs:
            self.logprobs.extend(later.logprobs)
        else:
            self.logprobs = self.logprobs or later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs


class HasState(Protocol):
    """What the caller keeps of one sequence."""

    @property
    def state(self) -> "RequestState":
        """Its request and ids."""


S = TypeVar("S", bound=HasState)


@dataclass(slots=True)
class Processed(Generic[S]):
    """The result of one step."""

    updates: list[tuple[S, SequenceOutput]] = field(default_factory=list)
    """One at most for each sequence."""
    aborts: list[int] = field(default_factory=list)
    """Sequences that ended here (stop string or error) and must be aborted in the core."""


class NewText(NamedTuple):
    """The result of decoding new ids."""

    text: str
    reasoning: str
    used: int
    """How many of the ids were decoded."""
    stop: str | None
    """The stop string that was found; reasoning and tool calls are not searched."""
    calls: list[CallDelta] | tuple[()] = ()
    num_reasoning: int = 0
    """How many ids turned out to be reasoning."""


class RequestState:
    """One running sequence: its request and all ids generated so far."""

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_min_tokens",
        "_reply",
        "_stops",
        "_undecided",
        "emitted",
        "ids_only",
        "logprobs",
        "prompt_logprobs",
        "request",
    )

    def __init__(self, request: AddRequest, tokenizer: Tokenizer | None, text: TextOptions):
        sampling = request.sampling
        self.request = request
        self.emitted: array[int] = array("i")
        self.logprobs = LogprobTrack(sampling.logprobs) if sampling.logprobs >= 0 else None
        self.prompt_logprobs = (
            PromptLogprobTrack(request.prompt_logprobs) if request.prompt_logprobs >= 0 else None
        )
        self._include_stop = text.include_stop
        self._min_tokens = sampling.logits_processors.min_tokens if sampling.logits_processors else 0
        self._stops = StopFinder(text.stop_strings) if text.stop_strings else None
        self._reply = text.reply() if text.reply and tokenizer else None
        self._undecided = 0
        """How many of the last ids may be reasoning or something else."""
        self._detokenizer = Detokenizer(tokenizer, text.skip_special_tokens) if tokenizer else None
        parts = self._detokenizer, self.logprobs, self.prompt_logprobs
        self.ids_only = all(part is None for part in parts)
        """Its updates have neither text nor log probabilities."""

    def append(self, ids: "array[int]", logprobs: Sequence[LogprobRow] = ()) -> NewText:
        """Decode new ids, up to the end of a stop string.

        `logprobs` has one entry per id, or is empty if the request has none.
        """
        if self._detokenizer is None:
            self.emitted.extend(ids)
            for entry in logprobs[: len(ids)]:
                self._track().add(entry, 0)
            return NewText("", "", len(ids), None)
        content = reasoning = ""
        calls: list[CallDelta] = []
        num_reasoning = 0
        for used, token_id in enumerate(ids, 1):
            self.emitted.append(token_id)
            text = self._detokenizer.feed(token_id)
            characters = len(text)
            if self._reply is not None:
                parsed = self._reply.feed(token_id, text)
                text = parsed.text
                characters = parsed.characters
                reasoning += parsed.reasoning
                merge_calls(calls, parsed.calls)
                num_reasoning += self._reasoning_ids(parsed, 1)
            if logprobs:
                self._track().add(logprobs[used - 1], characters)
            visible, stop = self._check_stops(text)
            content += visible
            if stop is not None:
                return NewText(content, reasoning, used, stop, calls, num_reasoning)
        return NewText(content, reasoning, len(ids), None, calls, num_reasoning)

    def finish(self, complete: bool) -> NewText:
        """The text held back so far; `complete` if the model ended the sequence."""
        if self._detokenizer is None:
            return NewText("", "", 0, None)
        text = self._detokenizer.finish()
        reasoning = ""
        calls: list[CallDelta] | tuple[()] = ()
        num_reasoning = 0
        if self._reply is not None:
            parsed = self._reply.finish(text, complete)
            text = parsed.text
            reasoning = parsed.reasoning
            calls = parsed.calls
            num_reasoning = self._reasoning_ids(parsed, 0)
        visible, stop = self._check_stops(text)
        if stop is None and self._stops is not None:
            visible += self._stops.finish()
        return NewText(visible, reasoning, 0, stop, calls, num_reasoning)

    @property
    def called(self) -> bool:
        """Whether the text has tool calls so far."""
        return self._reply is not None and self._reply.called

    def visible_ids(self, ids: "array[int]", end: Finished | None) -> "array[int]":
        """The ids whose text is returned: the stop token only with `include_stop`."""
        ended_by_id = end is not None and end.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        return ids[:-1] if ended_by_id and not self._include_stop else ids

    def release_logprobs(
        self, characters: int, without_text: Sequence[LogprobRow], finished: bool
    ) -> PackedLogprobs | tuple[()]:
        """Log probabilities of the next `characters` of text; `without_text` are tokens with no text."""
        track = self._track()
        for entry in without_text:
            track.add(entry, 0)
        if finished or self._detokenizer is None:
            return track.finish()
        return track.release(characters)

    def _reasoning_ids(self, parsed: ReplyDelta, num_new: int) -> int:
        """How many ids turn out to be reasoning, by what `num_new` more ids gave."""
        self._undecided += num_new
        if not (parsed.reasoning or parsed.text or parsed.calls):
            return 0
        found = self._undecided
        self._undecided = 0
        return found if parsed.reasoning else 0

    def _track(self) -> LogprobTrack:
        assert self.logprobs is not None
        return self.logprobs

    def _check_stops(self, text: str) -> tuple[str, str | None]:
        # The text of the first min_tokens tokens is not searched.
        if self._stops is None or not text:
            return text, None
        if self._min_tokens and len(self.emitted) <= self._min_tokens:
            return text, None
        visible, stop = self._stops.feed(text)
        return (visible + stop if stop is not None and self._include_stop else visible), stop


class OutputProcessor:
    """Makes updates of steps, for sequences that its caller keeps. Without a tokenizer they have ids only."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer

    def new_state(self, request: AddRequest, text: TextOptions) -> RequestState:
        """The state of one sequence of `request`; without text if its stream can be resumed.

        What renders such a stream makes the text, one token at a time.
        """
        if request.resumable is not None:
            return RequestState(request, None, TextOptions(include_stop=True))
        return RequestState(request, self._tokenizer, text)

    def text_state(self, request: AddRequest, text: TextOptions) -> "RequestState":
        """The state of one sequence, with text in any case."""
        return RequestState(request, self._tokenizer, text)

    def process(self, deltas: TokenDeltas, running: Mapping[int, S]) -> Processed[S]:
        """Process one step. Tokens of sequences that are not in `running`, by id, are ignored.

        A sequence whose tokens cannot be processed ends with an error and is aborted; all others go on. The
        caller removes those that have finished.
        """
        done: Processed[S] = Processed()
        ids = unpack_ids(deltas.token_ids)
        ends = {end.request_id: end for end in deltas.finished}
        cached = {first.request_id: first.cached_tokens for first in deltas.first}
        sampled = _StepLogprobs(deltas.logprobs) if deltas.logprobs is not None else None
        if deltas.prompt_logprobs:
            running = self._add_prompt_logprobs(deltas, running, done)
        start = 0
        for row, request_id in enumerate(deltas.request_ids):
            stop = start + (deltas.counts[row] if deltas.counts else 1)
            if (sequence := running.get(request_id)) is not None:
                update = SequenceOutput(request_id, ids[start:stop], cached_tokens=cached.get(request_id, 0))
                if deltas.num_proposed:
                    update.num_proposed = deltas.num_proposed[row]
                    update.num_accepted = stop - start - 1
                end = ends.pop(request_id, None)
                state = sequence.state
                try:
                    if state.ids_only and end is None:
                        state.emitted.extend(update.token_ids)
                    else:
                        logprobs: Sequence[LogprobRow] = ()
                        if sampled is not None and state.logprobs is not None:
                            logprobs = sampled.rows(start, stop)
                        self._advance(done, state, update, end, logprobs)
                    done.updates.append((sequence, update))
                except BaseException as error:
                    self._fail(done, sequence, request_id, error, core_finished=end is not None)
            start = stop
        for request_id, end in ends.items():
            if (sequence := running.get(request_id)) is not None:
                update = SequenceOutput(request_id, array("i"))
                try:
                    self._advance(done, sequence.state, update, end)
                    done.updates.append((sequence, update))
                except BaseException as error:
                    self._fail(done, sequence, request_id, error, core_finished=True)
        return done

    def _add_prompt_logprobs(
        self, deltas: TokenDeltas, running: Mapping[int, S], done: Processed[S]
    ) -> Mapping[int, S]:
        """Returns `running` without the sequences that failed."""
        for chunk in deltas.prompt_logprobs:
            sequence = running.get(chunk.owner)
            if sequence is not None and sequence.state.prompt_logprobs is not None:
                try:
                    sequence.state.prompt_logprobs.add(chunk)
                except BaseException as error:
                    self._fail(done, sequence, chunk.owner, error, core_finished=False)
                    running = {number: each for number, each in running.items() if number != chunk.owner}
        return running

    def _fail(
        self, done: Processed[S], sequence: S, request_id: int, error: BaseException, core_finished: bool
    ) -> None:
        """End one sequence with an error. A panic of a native extension is not an Exception."""
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)):
            raise error
        get_logger().error("request %d failed while its tokens became text", request_id, exc_info=error)
        message = f"the generated tokens could not be processed: {type(error).__name__}; see the server's log"
        update = SequenceOutput(request_id, array("i"), finished=True, error=message)
        update.reason = _RAW_REASONS[FinishReason.ERROR]
        done.updates.append((sequence, update))
        if not core_finished and request_id not in done.aborts:
            done.aborts.append(request_id)

    def _advance(
        self,
        done: Processed[S],
        state: RequestState,
        update: SequenceOutput,
        end: Finished | None,
        logprobs: Sequence[LogprobRow] = (),
    ) -> None:
        ids = update.token_ids
        if state.prompt_logprobs is not None and ids:
            update.prompt_logprobs = state.prompt_logprobs
            state.prompt_logprobs = None
        new = state.append(state.visible_ids(ids, end), logprobs)
        update.text, update.reasoning, used, stop_string, update.calls, update.num_reasoning = new
        without_text = logprobs[used:]
        if stop_string is not None:
            update.token_ids = ids[:used]
            without_text = ()
            update.num_accepted = min(update.num_accepted, used)
        elif end is not None:
            tail = state.finish(end.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN))
            update.text += tail.text
            update.reasoning += tail.reasoning
            update.num_reasoning += tail.num_reasoning
            update.calls = [*update.calls]
            merge_calls(update.calls, tail.calls)
            stop_string = tail.stop
        if stop_string is not None:
            self._finish_on_stop(done, update, stop_string, core_finished=end is not None)
        elif end is not None:
            update.finished = True
            update.reason = _raw_reason(end)
            update.error = end.message
            update.is_refused = end.reason is FinishReason.REFUSED
            update.leased = end.leased
            if end.reason is FinishReason.STOP_TOKEN:
                update.stop_reason = end.stop_token_id
        update.called = update.finished and state.called
        if state.logprobs is not None:
            characters = len(update.text) + len(update.reasoning) + call_characters(update.calls)
            update.logprobs = state.release_logprobs(characters, without_text, update.finished)

    def _finish_on_stop(
        self, done: Processed[S], update: SequenceOutput, stop: str, core_finished: bool
    ) -> None:
        update.finished = True
        update.stop_reason = stop
        update.reason = _RAW_REASONS[FinishReason.STOP_STRING]
        if not core_finished:
            done.aborts.append(update.request_id)


class _StepLogprobs:
    """The log probabilities of one step's sampled tokens."""

    def __init__(self, logprobs: SampledLogprobs):
        self._columns = LogprobColumns(logprobs.table)
        self._row_of = {index: row for row, index in enumerate(logprobs.indices)}

    def rows(self, start: int, stop: int) -> list[LogprobRow]:
        return [(self._columns, self._row_of[index]) for index in range(start, stop)]


def end_of(update: SequenceOutput) -> Finished | None:
    """The end from which an update without text was made; None for an update of a sequence that goes on."""
    if not update.finished:
        return None
    raw = update.reason or ""
    number = update.request_id
    if raw.startswith(_STOP_PREFIX) and raw.removeprefix(_STOP_PREFIX).isdigit():
        return Finished(number, FinishReason.STOP_TOKEN, int(raw.removeprefix(_STOP_PREFIX)))
    reason = FinishReason.REFUSED if update.is_refused else _REASONS[raw]
    return Finished(number, reason, message=update.error)


def ended_update(end: EndedSequence) -> SequenceOutput:
    """The update, without text, with all ids of a sequence that has ended."""
    finished = Finished(end.request_id, FinishReason(end.reason), end.stop_token_id)
    update = SequenceOutput(end.request_id, unpack_ids(end.output_ids), cached_tokens=end.cached_tokens)
    update.finished = True
    update.reason = _raw_reason(finished)
    return update


def _raw_reason(end: Finished) -> str:
    if end.reason is FinishReason.STOP_TOKEN:
        return f"{_STOP_PREFIX}{end.stop_token_id}"
    return _RAW_REASONS[end.reason]
