"""The stream that an HTTP request reads: the updates of all its sequences."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from atom.shared.messages.resume import EndedSequence
from frontend.engine_client.output_memory import HeldOutput
from frontend.engine_client.stream_files import StreamFile
from frontend.errors import ApiError, ResumedElsewhereError
from frontend.text.output_processor import SequenceOutput
from frontend.text.reply_formats.base import CallDelta, call_characters

__all__ = ["Deadline", "Stream", "StreamOptions", "timed"]

# Bytes of JSON, about. An entry of log probabilities: {"token":"the","logprob":-1.234567,"bytes":[116,…]}
_ID_BYTES = 8
_CHARACTER_BYTES = 3
_LOGPROB_BYTES = 80
_CALL_BYTES = 120
# Longest time before other tasks run while updates are joined.
_YIELD_S = 0.01


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a stream is read."""

    every_step: bool = True
    """Wake the reader at each step, not only when all sequences have ended."""
    logprobs: int = -1
    """Top tokens for each token; -1 without log probabilities."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a request is ended: at the time `at` (monotonic, seconds), `timeout_s` after its arrival."""

    timeout_s: float
    at: float


@contextlib.contextmanager
def timed(deadline: Deadline | None, on_time_out: Callable[[float], None]) -> Iterator[None]:
    """A block during which `on_time_out` gets the timeout at the deadline, if there is one."""
    timer = None
    if deadline is not None:
        left_s = max(deadline.at - time.monotonic(), 0.0)
        timer = asyncio.get_running_loop().call_later(left_s, on_time_out, deadline.timeout_s)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


class Stream:
    """The updates of one HTTP request, over all its sequences.

    Updates that wait for the reader are joined, one for each sequence, and counted in `output`.
    With `send_at_once` most updates do not wait for the reader.
    """

    def __init__(self, request_ids: list[int], options: StreamOptions, output: HeldOutput):
        self.open = set(request_ids)
        """Ids of the sequences that have not ended."""
        self.output = output
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self.queue_s = 0.0
        """From the arrival at the core to the admission of the first sequence with a token, in seconds."""
        self.prefill_s = 0.0
        """From its admission to its first token."""
        self.num_tokens = 0
        """Tokens of the sequences that have finished."""
        self.reasons: list[str] = []
        """Raw finish reasons of these sequences."""
        self.sequences_ended: list[EndedSequence] = []
        """The sequences that have ended, of a stream that can be resumed."""
        self.file: StreamFile | None = None
        """The file of a stream that can be resumed: it gets each update first."""
        self._every_step = options.every_step
        # The token's name, its own log probability, and those of the top tokens.
        entries = 2 + options.logprobs if options.logprobs >= 0 else 0
        self._token_bytes = _ID_BYTES + entries * _LOGPROB_BYTES
        self._pending: dict[int, SequenceOutput | _Joined] = {}
        self._error: Exception | None = None
        self._wake = asyncio.Event()
        self._send: Callable[[SequenceOutput], bool] | None = None
        self._is_idle = False
        """Whether the reader waits, and nothing has woken it."""

    def put(self, update: SequenceOutput, now: float) -> None:
        """Add an update, and wake the reader if it waits for every step or all sequences have ended."""
        if self.file is not None:
            self.file.add(update)
        if update.token_ids:
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
        if self._is_idle and self._send is not None and not update.finished and self._try_send(update):
            return
        earlier = self._pending.get(update.request_id)
        if earlier is not None:
            self._join(earlier, update)
        else:
            self._pending[update.request_id] = update
            if update.prompt_logprobs:
                self.output.hold(_LOGPROB_BYTES * update.prompt_logprobs.num_entries)
        if update.finished:
            self.open.discard(update.request_id)
        if self._every_step or not self.open or update.error:
            self._wake_reader()

    def send_at_once(self, send: Callable[[SequenceOutput], bool]) -> None:
        """Call `send` with each update that is not a sequence's last while the reader waits.

        It sends the update, or returns False without any effect: the reader gets the update then. Waking a
        task for each token costs several times as much as the call.
        """
        self._send = send

    def admitted(self, queue_s: float, prefill_s: float) -> None:
        """Note the times until the first token; those of the first sequence count."""
        if not self.first_token_at:
            self.queue_s = queue_s
            self.prefill_s = prefill_s

    def ended(self, reason: str, tokens: int) -> None:
        """Count a sequence that has finished with so many tokens."""
        self.reasons.append(reason)
        self.num_tokens += tokens

    @property
    def failed(self) -> bool:
        """Whether `fail` or `end` was called."""
        return self._error is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether it has ended here because another connection goes on with it."""
        return isinstance(self._error, ResumedElsewhereError)

    def fail(self, error: ApiError) -> None:
        """End the stream; the reader gets the pending updates and then `error`."""
        self._error = error
        if self.file is not None and not self.is_elsewhere:
            self.file.remove()
        self._wake_reader()

    def end(self, error: ApiError) -> None:
        """End the stream; the reader gets `error` instead of the pending updates."""
        self._pending = {}
        self.fail(error)

    def close(self) -> None:
        """Release the memory and the file of a stream that no reader will come for."""
        self.output.close()
        if self.file is not None:
            self.file.remove()

    def restart(self, updates: list[SequenceOutput]) -> None:
        """Give a new reader `updates`, all that the sequences have, in place of what was pending."""
        self.output.drop()
        self._pending = {update.request_id: update for update in updates}
        self._send = None
        self._wake_reader()

    def __aiter__(self) -> AsyncIterator[list[SequenceOutput]]:
        return self

    async def __anext__(self) -> list[SequenceOutput]:
        """At most one update for each sequence. Raises the error of `fail` or of sending."""
        if self.output.taken:
            self.output.sent()
        if self._error is None and not self.open and not self._pending:
            raise StopAsyncIteration
        self._is_idle = not self._wake.is_set()
        await self._wake.wait()  # bounded: the client fails all streams of a hung core
        if self._error is not None and not self._pending:
            raise self._error
        pending = self._pending
        self._pending = {}
        if self._error is None:
            self._wake.clear()
        if not self.output.pending:
            return list(pending.values())  # type: ignore[arg-type]  # joined ones are counted
        self.output.take()
        return await _updates(pending)

    def _wake_reader(self) -> None:
        self._is_idle = False
        self._wake.set()

    def _try_send(self, update: SequenceOutput) -> bool:
        assert self._send is not None
        try:
            return self._send(update)
        except Exception as error:  # no other request is concerned: its reader raises it
            self._error = error
            self._wake_reader()
            return True

    def _join(self, earlier: "SequenceOutput | _Joined", update: SequenceOutput) -> None:
        size = self._size(update)
        if isinstance(earlier, SequenceOutput):
            size += self._size(earlier)
            earlier = self._pending[update.request_id] = _Joined(earlier)
        earlier.append(update)
        self.output.hold(size)

    def _size(self, update: SequenceOutput) -> int:
        characters = len(update.text) + len(update.reasoning) + call_characters(update.calls)
        new_calls = sum(1 for call in update.calls if call.id)
        return (
            self._token_bytes * len(update.token_ids)
            + _CHARACTER_BYTES * characters
            + _CALL_BYTES * new_calls
        )


class _Joined:
    """Several updates of one sequence. Adding one does not copy those before."""

    __slots__ = ("_calls", "_first", "_reasoning", "_text")

    def __init__(self, first: SequenceOutput):
        self._first = first
        self._text = bytearray(_encoded(first.text))
        self._reasoning = bytearray(_encoded(first.reasoning))
        self._calls: list[tuple[CallDelta, bytearray]] = []
        """The beginning of each call, and its arguments."""
        self._add_calls(first)
        first.text = first.reasoning = ""

    def append(self, update: SequenceOutput) -> None:
        """Append the following update."""
        self._text += _encoded(update.text)
        self._reasoning += _encoded(update.reasoning)
        self._add_calls(update)
        update.text = update.reasoning = ""
        self._first.merge(update)

    def merged(self) -> SequenceOutput:
        """All of them as one."""
        self._first.text = self._text.decode(errors="surrogatepass")
        self._first.reasoning = self._reasoning.decode(errors="surrogatepass")
        for call, arguments in self._calls:
            call.arguments = arguments.decode(errors="surrogatepass")
        self._first.calls = [call for call, _ in self._calls]
        return self._first

    def _add_calls(self, update: SequenceOutput) -> None:
        calls = update.calls
        update.calls = ()
        for call in calls:
            arguments = _encoded(call.arguments)
            if self._calls and self._calls[-1][0].index == call.index:
                self._calls[-1][1].extend(arguments)
            else:
                self._calls.append((call, bytearray(arguments)))


async def _updates(pending: "dict[int, SequenceOutput | _Joined]") -> list[SequenceOutput]:
    updates = []
    yielded_at = time.monotonic()
    for each in pending.values():
        updates.append(each if isinstance(each, SequenceOutput) else each.merged())
        if time.monotonic() - yielded_at > _YIELD_S:
            await asyncio.sleep(0)
            yielded_at = time.monotonic()
    return updates


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
