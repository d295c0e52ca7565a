"""Sequences that run again after the end of their engine, and in which order.

A sequence is sent again as its prompt and the ids that it has emitted, so that its stream goes on where it
was. A request that ends every engine that runs it must neither do so for ever nor take others along. So the
deaths of each request are counted, over all of its sequences:

    1           it is sent again as soon as an engine is ready
    2           it is suspected, and tried: a few suspected requests at a time, until each is past the place
                where it died. If an engine ends meanwhile, only they, and requests that had hardly begun
                there, can be the cause. If several were tried, each half of them is tried next
    tried alone, and the engine ends: two more deaths, if nothing else can have been the cause
    more than `most`: it fails

A request that has got past the place where it died before the next engine ends has nothing to do with the
earlier deaths: they are forgotten. It must get four times as far each time, so that one that ends its engine
after many tokens is found as well. One frontend at a time tries requests (`TrialTurn`): the deaths meanwhile
count for no request of another one, but for those that are not past the place where they died.

Each sequence is sent with all of its ids, also where a request of many sequences had one prompt for all, so
only as many at once as fit `_MOST_STARTING_IDS` until they have a token. `EngineClient` sends them.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from atom.shared.utils.logger import get_logger
from frontend.engine_client.engine_connection import YIELD_S
from frontend.engine_client.sequence import RunningSequence
from frontend.engine_client.streams import Stream
from frontend.engine_client.trial_turn import TrialTurn

__all__ = ["MayRun", "Replays"]

MayRun = Callable[[RunningSequence], bool]

_SUSPECT = 2
"""Deaths after which a request is suspected."""
_TRIED_TOGETHER = 4
_MOST_ENDED = 6
"""Engines in a row that tried requests may end: then all suspected requests fail."""
_PAST = 16
"""New tokens after which a sequence has got past the place where it died: more than steps in flight give."""
_PAST_GROWTH = 4
"""Factor of these tokens each time that a request has got past them and an engine has ended again."""
_MOST_STARTING_IDS = 1 << 21
"""Prompt and output of the sequences that were sent again and have no new token; one alone may have more."""
_FORGET_S = 600.0
"""Deaths count if no more time is between them."""
_CHECK_S = 1.0


@dataclass(slots=True)
class _Case:
    """A request that was running when an engine ended. Each of its sequences is in one phase:

    waiting      in `Replays._waiting`, until an engine may run it
    starting     sent again, without a new token yet: it has `starting_ids`
    running      has new tokens
    suspected    in `suspected`, until its group is tried: then it waits, and is in `Replays._trial`
    """

    deaths: int = 0
    died_at: float = 0.0
    past: int = _PAST
    """New tokens after which it is past the place where it died."""
    sequences: set[RunningSequence] = field(default_factory=set)
    """Its sequences that have lost an engine and not ended."""
    suspected: set[RunningSequence] = field(default_factory=set)
    """Those of `sequences` that wait to be tried; the request is in a group while there are any."""


@dataclass(slots=True)
class _Trial:
    """Suspected requests that run."""

    streams: set[Stream]
    sequences: set[RunningSequence]
    """The sequences that are not past the place where they died."""


class _Blame(NamedTuple):
    """The deaths that were counted when an engine ended."""

    life: int
    streams: set[Stream]
    """The requests that may have ended it."""
    deaths: int
    """Number of deaths that each of these requests was charged with."""


class Replays:
    """`most` is how many deaths a request survives; 0: none.

    `together`: engines with the same number of their life share their end, as those that share experts.
    `turn` says whether this frontend may try requests; without it there is no other frontend.
    """

    def __init__(self, most: int, together: bool = False, turn: TrialTurn | None = None):
        self.most = most
        self.turn = turn or TrialTurn()
        self._together = together
        self._cases: dict[Stream, _Case] = {}
        self._waiting: dict[RunningSequence, None] = {}  # those that may be sent, in order
        self._groups: deque[list[Stream]] = deque()  # suspected requests, tried one group after the other
        self._trial: _Trial | None = None
        self._num_ended = 0  # engines that tried requests have ended, in a row
        self._explained_life = -1  # life that tried requests have ended, where engines end together
        self._blames: dict[int, _Blame] = {}  # by rank, until its engine is connected again
        self._starting_ids = 0  # sum over all sequences
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Sequences that wait for an engine."""
        return len(self._waiting) + sum(len(case.suspected) for case in self._cases.values())

    @property
    def is_watching(self) -> bool:
        """Whether `advanced` must be called."""
        return self._trial is not None or self._starting_ids > 0

    def stop(self) -> None:
        """From now on every sequence that loses its engine fails."""
        self.most = 0

    # Ends of engines

    def died(
        self, lost: Collection[RunningSequence], rank: int, life: int, is_planned: bool = False
    ) -> list[RunningSequence]:
        """Choose which sequences of an engine that has ended fail, and return them; the others wait.

        With `is_planned` no request has ended it.
        """
        if not self.most:
            return list(lost)
        by_stream: dict[Stream, list[RunningSequence]] = {}
        for sequence in lost:
            by_stream.setdefault(sequence.stream, []).append(sequence)
            self._started(sequence)
        tried = self._end_of_trial(by_stream)
        self._num_ended += bool(tried) and not is_planned
        blamed = set() if is_planned else self._blamed(by_stream, tried, life)
        weight = 2 if len(tried) == 1 and blamed == tried and self._knows_all else 1
        self._blames[rank] = _Blame(life, blamed, weight)
        failed = []
        suspected: list[Stream] = []
        for stream, sequences in by_stream.items():
            case = self._cases.setdefault(stream, _Case())
            case.sequences.update(sequences)
            if stream in blamed:
                self._count(case, weight, sequences)
            if stream in blamed or stream in tried:
                for sequence in sequences:
                    sequence.tokens_at_death = sequence.progress.tokens
            if case.deaths > self.most:
                failed += sequences
            elif stream in tried or (stream in blamed and case.deaths >= _SUSPECT):
                if stream in tried or not case.suspected:  # else it is in a group already
                    suspected.append(stream)
                case.suspected.update(sequences)
            else:
                self._waiting.update(dict.fromkeys(sequences))
        self._suspect_again([stream for stream in suspected if stream in tried])
        self._suspect([stream for stream in suspected if stream not in tried])
        if self._num_ended > max(_MOST_ENDED, self.most):
            failed += [sequence for case in self._cases.values() for sequence in case.suspected]
        self.wake()
        return failed

    @property
    def _knows_all(self) -> bool:
        """Whether no request can have ended an engine but those that this engine's end reports."""
        return self.turn.is_alone and not self._together

    def _blamed(
        self, lost: Mapping[Stream, list[RunningSequence]], tried: set[Stream], life: int
    ) -> set[Stream]:
        """The requests that may have ended an engine of this life, which ran the sequences `lost`."""
        if self._together:
            # All engines that end together end because of what is tried on one of them.
            is_explained = not tried and (life == self._explained_life or self._trial is not None)
            if tried or is_explained:
                self._explained_life = life
            if is_explained:
                return set()
        if not tried and not self.turn.is_of_another:
            return set(lost)
        new = {stream for stream, sequences in lost.items() if not self._is_past(stream, sequences)}
        # Several that were tried are tried again in halves: only what is new counts this death.
        return new | tried if len(tried) == 1 else new - tried

    def _is_past(self, stream: Stream, sequences: Iterable[RunningSequence]) -> bool:
        """Whether these sequences of a request have got past the place where they died, or begun, before."""
        case = self._cases.get(stream)
        past = _PAST if case is None else case.past
        return all(each.progress.tokens >= each.tokens_at_death + past for each in sequences)

    def _count(self, case: _Case, weight: int, sequences: list[RunningSequence]) -> None:
        now = time.monotonic()
        if now - case.died_at > _FORGET_S:
            case.deaths = 0
            case.past = _PAST
        elif case.deaths and self._is_past(sequences[0].stream, sequences):
            case.deaths = 0
            case.past *= _PAST_GROWTH
        case.deaths += weight
        case.died_at = now

    def _end_of_trial(self, lost: Iterable[Stream]) -> set[Stream]:
        """The tried requests that were on an engine that has ended; the trial of the others goes on."""
        trial = self._trial
        if trial is None or not (tried := trial.streams.intersection(lost)):
            return set()
        trial.streams -= tried
        for stream in tried:
            case = self._cases[stream]
            for sequence in case.sequences:
                sequence.passes_at = 0
                trial.sequences.discard(sequence)
                if sequence in self._waiting:
                    del self._waiting[sequence]
                    case.suspected.add(sequence)
        if not trial.sequences:
            self._end_trial()
        return tried

    def _suspect(self, streams: list[Stream]) -> None:
        size = min(_TRIED_TOGETHER, max(len(streams) // 2, 1))
        self._groups.extend(streams[first : first + size] for first in range(0, len(streams), size))

    def _suspect_again(self, streams: list[Stream]) -> None:
        """Try each half of requests that were tried together before all others; a single one after them."""
        half = len(streams) // 2
        if half:
            self._groups.extendleft((streams[half:], streams[:half]))
        elif streams:
            self._groups.append(streams)

    def wait(self, sequences: Iterable[RunningSequence], stream: Stream) -> None:
        """Let sequences of a request wait that could not be sent, as the engine of others has ended."""
        case = self._cases.setdefault(stream, _Case())
        case.sequences.update(sequences)
        if case.suspected:
            case.suspected.update(sequences)
        else:
            self._waiting.update(dict.fromkeys(sequences))
        self.wake()

    def connected(self, rank: int, life: int) -> None:
        """Try what waits for an engine again. If only its connection was lost, this one has not died."""
        if (blame := self._blames.pop(rank, None)) is not None and blame.life == life:
            for stream in blame.streams:
                if (case := self._cases.get(stream)) is not None:
                    case.deaths -= blame.deaths
        self.wake()

    # Sequences

    def wake(self) -> None:
        """Something has changed: see what may run."""
        self._changed.set()

    async def run(self, may_run: Callable[[], MayRun], send: Callable[[RunningSequence], None]) -> None:
        """Until cancelled, call `send` with each sequence once it may run, between other tasks.

        `may_run()` tells that of each sequence for the engines that are ready at that moment. `send` calls
        `sent`, or `ended` for one that cannot be sent.
        """
        try:
            while True:
                # No message says that an engine responds again: its heartbeats do.
                with_limit = asyncio.timeout(_CHECK_S if len(self) else None)
                try:
                    async with with_limit:
                        await self._changed.wait()
                except TimeoutError:
                    if not with_limit.expired():
                        raise
                self._changed.clear()
                await self._send_due(may_run, send)
        except Exception:  # streams would wait forever: end the process, and so the server
            get_logger().critical("the frontend cannot send sequences again", exc_info=True)
            os._exit(1)

    async def _send_due(self, may_run: Callable[[], MayRun], send: Callable[[RunningSequence], None]) -> None:
        accepts = may_run()
        yielded_at = time.monotonic()
        for sequence in self.due(accepts):
            if time.monotonic() - yielded_at > YIELD_S:
                await asyncio.sleep(0)
                accepts = may_run()
                yielded_at = time.monotonic()
            has_room = self._starting_ids < _MOST_STARTING_IDS
            if sequence in self._waiting and has_room and accepts(sequence):
                send(sequence)

    def due(self, may_run: MayRun) -> list[RunningSequence]:
        """The waiting sequences to send now: all that may run."""
        if self._trial is None and self._is_my_turn(may_run):
            self._begin_trial(may_run)
        return [sequence for sequence in self._waiting if may_run(sequence)]

    def _is_my_turn(self, may_run: MayRun) -> bool:
        """Whether suspected requests may run now; asks for it if there are any and the turn is another's."""
        in_groups = (stream for group in self._groups for stream in group)
        if not any(any(map(may_run, self._cases[stream].suspected)) for stream in in_groups):
            self.turn.leave()
            return False
        return self.turn.ask()

    def _begin_trial(self, may_run: MayRun) -> None:
        for place, group in enumerate(self._groups):
            streams = {stream for stream in group if any(map(may_run, self._cases[stream].suspected))}
            if streams:
                self._groups[place] = [stream for stream in group if stream not in streams]
                sequences: set[RunningSequence] = set()
                for stream in streams:
                    case = self._cases[stream]
                    sequences |= case.suspected
                    case.suspected = set()
                self._waiting.update(dict.fromkeys(sorted(sequences, key=lambda each: each.id)))
                self._trial = _Trial(streams, sequences)
                break
        self._groups = deque(group for group in self._groups if group)

    def _end_trial(self) -> None:
        self._trial = None
        self.turn.leave()

    def sent(self, sequence: RunningSequence, num_ids: int) -> None:
        """`sequence` was sent to an engine, with `num_ids` ids."""
        del self._waiting[sequence]
        sequence.starting_ids = num_ids
        self._starting_ids += num_ids
        if self._trial is not None and sequence in self._trial.sequences:
            sequence.passes_at = sequence.progress.tokens + self._cases[sequence.stream].past

    def advanced(self, sequence: RunningSequence) -> None:
        """`sequence` has one or more new tokens."""
        self._started(sequence)
        if sequence.passes_at and sequence.progress.tokens >= sequence.passes_at:
            self._leave_trial(sequence)

    def ended(self, sequence: RunningSequence) -> None:
        """`sequence` has ended, for any reason."""
        stream = sequence.stream
        if (case := self._cases.get(stream)) is None:
            return
        self._started(sequence)
        self._waiting.pop(sequence, None)
        self._leave_trial(sequence)
        case.sequences.discard(sequence)
        if case.suspected == {sequence}:
            for group in self._groups:
                if stream in group:
                    group.remove(stream)
            self.wake()  # perhaps nothing is left to be tried
        case.suspected.discard(sequence)
        if not case.sequences:
            del self._cases[stream]

    def _leave_trial(self, sequence: RunningSequence) -> None:
        """`sequence` is past the place where it died, or has ended. The last one ends the trial."""
        sequence.passes_at = 0
        trial = self._trial
        if trial is None or sequence not in trial.sequences:
            return
        trial.sequences.remove(sequence)
        if not trial.sequences:
            self._end_trial()
            self._num_ended = 0
            self.wake()

    def _started(self, sequence: RunningSequence) -> None:
        """`sequence` does not wait for its first new token any more."""
        if sequence.starting_ids:
            self._starting_ids -= sequence.starting_ids
            sequence.starting_ids = 0
            self.wake()
