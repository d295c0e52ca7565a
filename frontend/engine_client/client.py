"""The links to all engine cores, for all requests of this process.

Each core's task receives the tokens of a step, detokenizes them and wakes each stream at most once a
step. A stream keeps at most one pending update for each sequence: a slow reader gets merged updates
and delays no other request.

An engine has a rank and, counted from 0, lives. `set_engines` gets the lives that there are now: their links
are opened, those of other lives are closed. The sequences of an engine that ends wait for another engine or
its next life, and go on there, as a RunningSequence has the request and all ids emitted. `Replays` knows
which ones wait, and which ones fail.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Collection, Iterable
from types import TracebackType

from atom.shared.messages.admin import Done, RequestInfos
from atom.shared.messages.engine import (
    ID_BYTES,
    Abort,
    AddRequest,
    CoreReady,
    CoreStats,
    Finished,
    FinishReason,
    FromCore,
    TokenDeltas,
)
from atom.shared.messages.grammar import GetGrammar, GrammarBytes
from atom.shared.messages.launch import EngineAddress
from atom.shared.messages.profile import ProfileResult
from atom.shared.messages.resume import Claimed
from atom.shared.messages.supervisor import EngineEnded, Trial
from atom.shared.utils.logger import get_logger
from frontend.engine_client.admission import Admission, AdmissionSlot
from frontend.engine_client.client_settings import ClientHooks, ClientSettings
from frontend.engine_client.dp_router import DPRouter
from frontend.engine_client.engine_connection import YIELD_S, EngineConnection
from frontend.engine_client.engine_control import EngineControl
from frontend.engine_client.engine_set import EngineSet
from frontend.engine_client.handover import Handovers
from frontend.engine_client.output_memory import HeldOutput, OutputMemory
from frontend.engine_client.placement import Placement
from frontend.engine_client.replay import MayRun, Replays
from frontend.engine_client.resumption import Adoption, ResumedStream, Resumption, ResumptionHooks
from frontend.engine_client.sequence import RunningSequence
from frontend.engine_client.streams import Deadline, Stream, StreamOptions, timed
from frontend.engine_client.trial_turn import TrialTurn
from frontend.errors import (
    ApiError,
    DeadlineError,
    EngineLostError,
    InternalError,
    OverloadedError,
    ResumedElsewhereError,
    UnavailableError,
)
from frontend.metrics.metrics import Metrics, Progress, RunningRequest
from frontend.text.output_processor import OVERLOADED, OutputProcessor, SequenceOutput, TextOptions

__all__ = ["ID_BITS", "EngineClient"]

_OVERDUE = "the request has waited for its engine for longer than --max-queue-time: try again later"
_MOST_NAMES = 8
"""Requests that a log line names."""
ID_BITS = 40
"""Low bits of a request id; the number of its frontend is above them."""
_LIFE_BITS = 4
"""High bits of these: the life of its frontend, since sequences of earlier lives may be unfinished."""


class EngineClient:
    """Sends requests to engine cores and distributes their tokens to streams.

    `admission` bounds the sequences in progress. `control` asks engines for other things than requests.

    While a core is silent, its streams wait; after the hang timeout they fail. The client reconnects then,
    and after every end of a connection, until `set_engines` leaves that life out.
    """

    def __init__(
        self,
        engines: list[EngineAddress],
        settings: ClientSettings,
        router: DPRouter,
        output: OutputProcessor,
        metrics: Metrics,
        hooks: ClientHooks = ClientHooks(),  # noqa: B008 (it is frozen)
    ):
        self.settings = settings
        self.engines = EngineSet(settings, self._process, self._lost, self._closed)
        self.admission = Admission(self, settings.capacity(settings.num_ranks), metrics, settings.max_queue_s)
        self.output_memory = OutputMemory(settings.max_output_bytes)
        self.output = output
        self._metrics = metrics
        self._hooks = hooks
        life = settings.life % (1 << _LIFE_BITS)
        self._counter = itertools.count((settings.index << ID_BITS) + (life << (ID_BITS - _LIFE_BITS)))
        self._initial = engines
        handovers = Handovers(settings.prefill_engines, settings.block_tokens, settings.prefill_min_tokens)
        self._placement = Placement(self.engines, router, handovers, metrics)
        self.control = EngineControl(self.engines, self._counter)
        self._sequences: dict[int, RunningSequence] = {}  # by id, the oldest first
        self._replays = Replays(
            settings.max_replays,
            together=settings.engines_end_together,
            turn=TrialTurn(settings.index, hooks.want_trial),
        )
        self._ending_life = -1
        """Life of the engines that are about to end because another one of that life has."""
        self.num_failed = 0
        """Sequences that have failed as an engine has ended."""
        resumed = ResumptionHooks(
            lambda: self._stream([], -1), self._adopt, self._unfinished, self._close, hooks.handed_stream
        )
        self.resumption = Resumption(self.engines, settings, metrics, resumed)

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def capacity(self) -> int:
        """Sequences that may be in progress while these engines are ready."""
        return self.engines.capacity

    @property
    def running_capacity(self) -> float:
        """Sequences that the engines run at once, of this frontend."""
        return self.engines.running_capacity

    def oldest_requests(self, count: int) -> list[RunningRequest]:
        """The oldest `count` sequences in progress, the oldest first."""
        return [each.running_request() for each in itertools.islice(self._sequences.values(), count)]

    async def __aenter__(self) -> "EngineClient":
        self.set_engines(self._initial)
        self.resumption.open()
        replaying = self._replays.run(self._may_run, self._send_again)
        self._replayer = asyncio.create_task(replaying, name="replays")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._replayer.cancel()
        self._replays.stop()
        self.resumption.close()
        reason = "the server is stopping"
        self.engines.close_all(reason)
        self._fail(list(self._sequences.values()), reason)
        await asyncio.gather(self._replayer, return_exceptions=True)
        await self.engines.wait_closed()

    # Engines

    def set_engines(
        self,
        engines: Collection[EngineAddress],
        ended: Collection[EngineEnded] = (),
        trial: Trial | None = None,
    ) -> None:
        """Open the links of new lives, and close those of lives that are not among `engines`.

        Sequences on the closed ones run again, or fail with the reason in `ended`. `trial`: the frontend
        that may try requests.
        """
        self._replays.turn.set_current(trial or Trial())
        self._replays.wake()
        self.engines.change_to(engines, ended)
        self._fail_hopeless()

    def check_ready(self, rank: int | None = None) -> None:
        """Raises UnavailableError while no engine can generate, or a request for that of `rank` cannot wait.

        RequestError for a rank that does not exist.
        """
        can_wait = self._replays.most > 0 and 2 * len(self._replays) <= self.settings.max_queued
        self.engines.check_ready(rank, can_wait)

    async def abort_named(self, names: list[str], everything: bool = False, tenant: str | None = None) -> int:
        """End these requests, of all frontends, or all; returns how many sequences.

        With `tenant` only those of its API key. Those that wait for an engine: of this frontend alone.
        """
        waiting = [sequence for sequence in self._sequences.values() if sequence.engine is None]
        named = [each for each in waiting if everything or each.name in names]
        ended = [each.id for each in named if tenant in (None, each.state.request.tenant)]
        ends = [Finished(number, FinishReason.ABORTED) for number in ended]
        self._advance(0, time.monotonic(), TokenDeltas(0, [], b"", finished=ends))
        if ended and not self.engines.is_ready:
            return len(ended)
        return len(ended) + await self.control.abort_named(names, everything, tenant)

    # Requests

    def new_ids(self, count: int) -> list[int]:
        """New unique request ids, ascending."""
        return list(itertools.islice(self._counter, count))

    @contextlib.asynccontextmanager
    async def open(
        self,
        requests: list[AddRequest],
        text: TextOptions,
        every_step: bool = True,
        rank: int | None = None,
        deadline: Deadline | None = None,
        slot: AdmissionSlot | None = None,
    ) -> AsyncIterator[Stream]:
        """Send `requests` and read their results as one stream; on exit unfinished ones are aborted.

        Without `every_step` the stream wakes its reader once, when all sequences have ended. Without `rank`
        the router chooses one for each request. If no engine is ready, they wait for one, or the stream fails
        at once where no replays are allowed. `slot` is the reservation of the sequences.
        A stream with too much output that is not sent yet ends with an error: see `OutputMemory`. At
        the deadline the sequences end with reason timeout; the stream fails if it has no token then.
        """
        logprobs = max(request.sampling.logprobs for request in requests)
        ids = [i for request in requests for i in request.request_ids]
        stream = self._stream(ids, logprobs, every_step)
        begun = self.resumption.begun(requests, stream)
        kept = None  # what was not sent whole cannot go on without its reader
        with timed(deadline, lambda timeout_s: self._time_out(stream, timeout_s)):
            try:
                await self._submit_all(requests, text, stream, rank, slot)
                kept = begun
                yield stream
            finally:
                self._leave(stream, kept)

    @contextlib.asynccontextmanager
    async def open_resumed(
        self, resumed: ResumedStream, deadline: Deadline | None = None
    ) -> AsyncIterator[Stream]:
        """Read a stream that was begun before; like `open`, but that what runs is not sent."""
        self.resumption.begin(resumed)
        with timed(deadline, lambda timeout_s: self._time_out(resumed.stream, timeout_s)):
            try:
                yield resumed.stream
            finally:
                self._leave(resumed.stream, resumed)

    def _leave(self, stream: Stream, resumed: ResumedStream | None) -> None:
        """Keep a stream, whose reader is gone, for another one, or end it."""
        if resumed is not None and stream.open and not stream.failed:
            self.resumption.keep(resumed)
        else:
            self._close(stream)

    def _close(self, stream: Stream) -> None:
        """End the sequences of a stream, which has no reader any more."""
        self._abort(stream)
        stream.close()

    def finish(self, stream: Stream, request_ids: list[int], reason: FinishReason) -> None:
        """End unfinished sequences of a stream, for a reason that its reader has found."""
        self._finish_early(stream.open.intersection(request_ids), reason)

    def _stream(self, request_ids: list[int], logprobs: int, every_step: bool = True) -> Stream:
        memory = self.output_memory
        limit = memory.stream_limit if every_step else memory.response_limit
        output = HeldOutput(memory, limit, lambda error: self._limit(stream, error))
        stream = Stream(request_ids, StreamOptions(every_step, logprobs), output)
        return stream

    def _unfinished(self, stream: Stream) -> list[RunningSequence]:
        """The unfinished sequences of a resumable stream."""
        return [self._sequences[number] for number in sorted(stream.open)]

    def _adopt(self, adoption: Adoption) -> None:
        """Go on with a sequence that an engine runs, or that waits for one.

        An earlier stream of this frontend that has it ends: its client has asked for it again.
        """
        if (earlier := self._sequences.get(adoption.sequence.request_id)) is not None:
            self._end(earlier)
            earlier.stream.fail(ResumedElsewhereError())
        engine, request, stream = adoption.engine, adoption.request, adoption.stream
        state = self.output.new_state(request, TextOptions())
        sequence = RunningSequence.adopted(adoption.sequence, request, state, stream)
        self._sequences[sequence.id] = sequence
        stream.open.add(sequence.id)
        if engine is None:
            self._replays.wait([sequence], stream)
            return
        self._placement.adopt(sequence, engine)

    def _limit(self, stream: Stream, error: ApiError) -> None:
        """End a stream that holds too much output, and abort its sequences."""
        self._metrics.output_limited += 1
        self._abort(stream)
        stream.end(error)

    def _time_out(self, stream: Stream, timeout_s: float) -> None:
        """End the sequences of a stream as the core would, with what they have generated."""
        if stream.failed:
            return
        if not stream.first_token_at or not stream.open <= self._sequences.keys():
            self._abort(stream, FinishReason.TIMEOUT)
            stream.end(DeadlineError(timeout_s))
            return
        self._finish_early(stream.open, FinishReason.TIMEOUT)

    def _finish_early(self, request_ids: Collection[int], reason: FinishReason) -> None:
        """End sequences as the core would, with what they have generated."""
        by_engine: dict[tuple[int, EngineConnection | None], list[int]] = {}
        for request_id in sorted(request_ids):
            sequence = self._sequences[request_id]
            by_engine.setdefault((sequence.rank, sequence.engine), []).append(request_id)
        for (rank, engine), running in by_engine.items():
            if engine is not None:
                engine.link.send(Abort(running, reason))
            ends = [Finished(request_id, reason) for request_id in running]
            self._advance(rank, time.monotonic(), TokenDeltas(0, [], b"", finished=ends))

    async def _submit_all(
        self,
        requests: list[AddRequest],
        text: TextOptions,
        stream: Stream,
        rank: int | None,
        slot: AdmissionSlot | None,
    ) -> None:
        """Send `requests`, with turns for other tasks in between, until the stream fails."""
        yielded_at = time.monotonic()
        for position, request in enumerate(requests):
            if time.monotonic() - yielded_at > YIELD_S:
                await asyncio.sleep(0)
                yielded_at = time.monotonic()
            if stream.failed:
                return
            try:
                ready = self.engines.ready_ranks(rank)
            except UnavailableError as error:
                if not self._replays.most:
                    self._metrics.engine(rank or 0).failed(
                        sum(len(each.request_ids) for each in requests[position:])
                    )
                    self.num_failed += 1
                    stream.fail(error)
                    return
                ready = []
            sequences = self._add(request, text, stream, rank, slot)
            if ready:
                self._placement.send(request, sequences, ready)
            else:
                self._replays.wait(sequences, stream)
                self._limit_wait(sequences)
        self._fail_hopeless()

    def _limit_wait(self, sequences: list[RunningSequence]) -> None:
        """Sequences that no engine has got yet wait for one no longer than the queue limit allows."""
        if (most_s := self.settings.max_queue_s) is not None:
            left_s = max(sequences[0].progress.arrived_at + most_s - time.monotonic(), 0.0)
            asyncio.get_running_loop().call_later(left_s, self._end_overdue, [each.id for each in sequences])

    def _end_overdue(self, request_ids: list[int]) -> None:
        for sequence in filter(None, map(self._sequences.get, request_ids)):
            if sequence.engine is None and not sequence.replays:
                end = Finished(sequence.id, FinishReason.OVERLOADED, message=_OVERDUE)
                self._advance(sequence.rank, time.monotonic(), TokenDeltas(0, [], b"", finished=[end]))

    def _add(
        self,
        request: AddRequest,
        text: TextOptions,
        stream: Stream,
        rank: int | None,
        slot: AdmissionSlot | None,
    ) -> list[RunningSequence]:
        """The sequences of a request, from now on in progress."""
        if slot is not None:
            slot.begin(len(request.request_ids))
        arrived_at = time.monotonic() if slot is None else slot.arrived_at
        sequences = []
        for request_id in request.request_ids:
            progress = Progress(arrived_at, request.num_prompt_ids)
            state = self.output.new_state(request, text)
            sequences.append(RunningSequence(request_id, state, stream, progress, rank, rank or 0))
        self._sequences.update(zip(request.request_ids, sequences, strict=True))
        return sequences

    def _abort(self, stream: Stream, reason: FinishReason = FinishReason.ABORTED) -> None:
        """End the sequences of a stream, here and in their engines, unless it goes on elsewhere."""
        by_engine: dict[EngineConnection, list[int]] = {}
        for request_id in sorted(stream.open):
            if (sequence := self._sequences.get(request_id)) is not None:
                if sequence.engine is not None and not stream.is_elsewhere:
                    by_engine.setdefault(sequence.engine, []).append(request_id)
                self._metrics.engine(sequence.rank).aborted()
                self._end(sequence)
                self.admission.ended()
        for engine, running in by_engine.items():
            engine.link.send(Abort(running, reason))

    def _end(self, sequence: RunningSequence) -> None:
        """Forget a sequence that has ended, for any reason; the caller counts it."""
        del self._sequences[sequence.id]
        sequence.stream.open.discard(sequence.id)
        self._placement.leave(sequence)
        self._replays.ended(sequence)

    # Messages

    def _process(self, engine: EngineConnection, message: FromCore) -> None:
        match message:
            case TokenDeltas():
                self._deliver(engine, message)
            case CoreReady():
                self.control.connected(engine)
                if (limits := self.engines.limits) is not None:
                    self._hooks.on_ready(limits.max_model_len)
                self.engines.note_ready()
                self._ending_life = -1
                self._replays.connected(engine.rank, engine.life)
            case GetGrammar(key):
                if (source := self._hooks.grammar_source(key)) is not None:
                    engine.link.send(GrammarBytes(key, source))
            case Claimed():
                self.resumption.answered(engine, message)
            case CoreStats() | ProfileResult() | RequestInfos() | Done():
                self.control.answered(engine, message)

    def _deliver(self, engine: EngineConnection, deltas: TokenDeltas) -> None:
        handed, deltas = self._placement.take_handed(deltas, self._sequences)
        for abort in self._advance(engine.rank, engine.received_at, deltas):
            engine.link.send(abort)
        for sequence in handed:
            self._hand_over(sequence, engine)
        if self.output_memory.is_exceeded:
            self.output_memory.enforce()

    def _hand_over(self, sequence: RunningSequence, engine: EngineConnection) -> None:
        """Send a sequence whose prompt `engine` has computed to another engine, which generates."""
        if sequence.engine is not engine:
            return  # it has ended with another sequence of its stream
        self._metrics.engine(engine.rank).handed_over += 1
        self._placement.leave(sequence)
        if ready := self._ranks_for_replays():
            self._placement.send(sequence.resumed(), [sequence], ready)
        else:
            self._replays.wait([sequence], sequence.stream)

    def _advance(self, rank: int, now: float, deltas: TokenDeltas) -> list[Abort]:
        """Give new tokens and ends to the streams; what ended here must be aborted in the core."""
        done = self.output.process(deltas, self._sequences)
        metrics = self._metrics.engine(rank)
        for first in deltas.first:
            if (admitted := self._sequences.get(first.request_id)) is not None:
                metrics.admitted(first)
                admitted.progress.queue_s = first.queued_s
                admitted.cached_tokens = first.cached_tokens
                admitted.stream.admitted(first.queued_s, first.prefill_s)
        replays = self._replays
        for sequence, update in done.updates:
            if tokens := len(update.token_ids):
                metrics.advanced(sequence.progress, tokens, now)
                if replays.is_watching:
                    replays.advanced(sequence)
            sequence.stream.put(update, now)
            if update.finished:
                self._finish(update, sequence, now)
        if not done.aborts:
            return []
        failed = {update.request_id for _, update in done.updates if update.error}.intersection(done.aborts)
        stopped = [request_id for request_id in done.aborts if request_id not in failed]
        reasons = (stopped, FinishReason.STOP_STRING), (sorted(failed), FinishReason.ERROR)
        return [Abort(ids, reason) for ids, reason in reasons if ids]

    def _finish(self, update: SequenceOutput, sequence: RunningSequence, now: float) -> None:
        assert update.reason is not None
        if sequence.id not in self._sequences:
            return  # another sequence has ended its stream
        sequence.stream.ended(update.reason, sequence.progress.tokens)
        self._metrics.engine(sequence.rank).finished(sequence.progress, update.reason, now)
        self._end(sequence)
        if sequence.state.request.resumable is not None:
            self.resumption.ended(sequence, update)
        if update.reason == OVERLOADED:  # its end says nothing about the rate
            self._metrics.refused += 1
            sequence.stream.end(OverloadedError(update.error, self.admission.retry_after_s()))
            self._abort(sequence.stream)
        else:
            self.admission.ended()

    # Ends of engines

    def _fail(self, sequences: Iterable[RunningSequence], reason: str) -> None:
        """Fail these sequences, and with each its stream, whose other sequences are aborted."""
        streams = set()
        for sequence in sequences:
            streams.add(sequence.stream)
            self.num_failed += 1
            self._metrics.engine(sequence.rank).failed(1)
            self._end(sequence)
        for stream in streams:
            stream.fail(EngineLostError(reason))
            self._abort(stream)

    def _closed(self, engine: EngineConnection, reason: str) -> None:
        """Forget what a life of an engine had computed, which has ended."""
        self._placement.forget(engine.rank)
        self._lost(engine, reason)

    def _lost(self, engine: EngineConnection, reason: str, is_fault: bool = False) -> None:
        """Run the sequences of `engine`, whose connection has ended, again or fail them; its questions fail.

        After a fault of this process, `is_fault`, streams may not have got all tokens: they fail.
        """
        is_planned = (engine.rank, engine.life) in self.engines.planned
        lost = [sequence for sequence in self._sequences.values() if sequence.engine is engine]
        for sequence in lost:
            self._placement.leave(sequence)
        self._finish_early([each.id for each in lost if each.is_complete], FinishReason.MAX_TOKENS)
        lost = [each for each in lost if not each.is_complete]
        failed = lost if is_fault else self._replays.died(lost, engine.rank, engine.life, is_planned)
        if num_again := len(set(lost).difference(failed)):  # what waited may fail, too
            self._metrics.engine(engine.rank).replayed += num_again
            get_logger().warning("engine %d: %d of %d sequences run again", engine.rank, num_again, len(lost))
        if failed and self._replays.most and not is_fault:
            names = sorted({sequence.name for sequence in failed})
            get_logger().error("requests that have ended engines fail: %s", ", ".join(names[:_MOST_NAMES]))
            reason += "; replays of the request have ended so, too"
        self._fail(failed, reason)
        if self.settings.engines_end_together:
            self._ending_life = engine.life
        self._fail_hopeless()
        self.control.lost(engine, reason)
        self.resumption.lost(engine)

    def _fail_hopeless(self) -> None:
        """Fail what waits for engines that are not started again."""
        final = self.engines.final
        if not (final and len(self._replays)):
            return
        everywhere = len(final) == self.settings.num_ranks
        hopeless = [
            sequence
            for sequence in self._sequences.values()
            if sequence.engine is None and (sequence.wanted in final or everywhere)
        ]
        for sequence in hopeless:
            if sequence.id in self._sequences:  # else its stream has failed
                self._fail([sequence], final.get(sequence.rank) or next(iter(final.values())))

    def _send_again(self, sequence: RunningSequence) -> None:
        """Send a sequence that waits for an engine."""
        sequence.replays += 1
        try:
            request = sequence.resumed()
            ranks = self._ranks_for_replays()
            self._placement.send(request, [sequence], ranks if sequence.wanted is None else [sequence.wanted])
        except Exception:
            get_logger().error("sequence %d cannot run again", sequence.id, exc_info=True)
            sequence.stream.fail(InternalError())
            self._abort(sequence.stream)
        else:
            self._replays.sent(sequence, len(request.prompt_ids) // ID_BYTES)

    def _ranks_for_replays(self) -> list[int]:
        return [each.rank for each in self.engines if each.link.is_ready and each.life != self._ending_life]

    def _may_run(self) -> MayRun:
        """Whether an engine that is ready now may run a waiting sequence."""
        ranks = self._ranks_for_replays()
        wanted = {*ranks, None} if ranks else set()
        return lambda sequence: sequence.wanted in wanted
