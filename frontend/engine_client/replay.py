"""Sequences that run again after the end of their engine, and in which order.

A sequence is sent again as its prompt and the ids that it has emitted, so that its stream goes on where it
was. A request that ends every engine that runs it must neither do so for ever nor take others along. So the
deaths of each request are counted, over all of its sequences:

    1           it is sent again as soon as an engine is ready
    2           it is suspected, and tried: a few suspected requests at a time, until each is past the place
                where it died. If an engine ends meanwhile, only they, and requests that had hardly begun
                there, can be the cause. Of several that are tried, each half is tried then
    tried alone, and the engine ends: two more deaths, if nothing else can have been the cause
    more than `most`: it fails

Each sequence is sent with all of its ids, also where a request of many sequences had one prompt for all, so
only as many at once as fit `_MOST_STARTING_IDS` until they have a token. `EngineClient` sends them.
"""

import asyncio
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from atom.shared.utils.logger import get_logger
from frontend.engine_client.engine_connection import YIELD_S
from frontend.engine_client.sequence import Sequence
from frontend.engine_client.streams import Stream

__all__ = ["Replays"]

MayRun = Callable[[int], bool]

_SUSPECT = 2
"""Deaths."""
_TRIED_TOGETHER = 4
_MOST_ENDED = 6
"""Engines in a row that tried requests may end: then all suspected requests fail."""
_PAST = 16
"""New tokens after which a sequence has got past the place where it died: more than steps in flight give."""
_MOST_STARTING_IDS = 1 << 21
"""Prompt and output of the sequences that were sent again and have no new token; one alone may have more."""
_FORGET_S = 600.0
"""Deaths count if no more time is between them."""
_SPREAD_S = 3.0
"""Frontends begin to try requests at random times after the start of an engine, not all at once."""
_CHECK_S = 1.0


@dataclass(slots=True)
class _Case:
    """A request that was running when an engine ended."""

    deaths: int = 0
    died_at: float = 0.0
    ids: set[int] = field(default_factory=set)
    """Its sequences that have lost an engine and not ended."""
    suspected: set[int] = field(default_factory=set)
    """Those of them that wait to be tried."""
    in_group: bool = False


@dataclass(slots=True)
class _Trial:
    """Suspected requests that run."""

    streams: set[Stream]
    until: dict[int, int | None]
    """Of sequences that are not past the place where they died: tokens they need; None: not sent."""


class Replays:
    """`most` is how many deaths a request survives; 0: none.

    `together`: engines with the same number of their life share their end, as those that share experts.
    `alone`: no other frontend tries requests on the same engines.
    """

    def __init__(self, most: int, together: bool = False, alone: bool = True):
        self.most = most
        self._together = together
        self._alone = alone
        self._cases: dict[Stream, _Case] = {}
        self._waiting: dict[int, Stream] = {}  # sequences that may be sent
        self._groups: deque[list[Stream]] = deque()  # suspected requests, tried one group after the other
        self._trial: _Trial | None = None
        self._try_from = 0.0
        self._num_ended = 0  # by tried requests, in a row
        self._explained_life = -1  # that tried requests have ended, where engines end together
        # By rank: the life that it has lost, whose death that was, and how many deaths it counted.
        self._counted: dict[int, tuple[int, set[Stream], int]] = {}
        self._starting: dict[int, int] = {}  # ids sent, by sequence
        self._starting_ids = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Sequences that wait for an engine."""
        return len(self._waiting) + sum(len(case.suspected) for case in self._cases.values())

    @property
    def is_watching(self) -> bool:
        """Whether `advanced` must be called."""
        return self._trial is not None or bool(self._starting)

    # Ends of engines

    def died(self, lost: Mapping[int, Sequence], rank: int, life: int) -> list[int]:
        """The engine of these sequences has ended. Returns those that fail; the others wait."""
        if not self.most:
            return list(lost)
        by_stream: dict[Stream, list[int]] = {}
        for number, sequence in lost.items():
            by_stream.setdefault(sequence.stream, []).append(number)
            self._started(number)
        # All engines that end together end because of what is tried on one of them.
        explained = self._together and (life == self._explained_life or self._trial is not None)
        tried = self._end_of_trial(by_stream)
        new = {each.stream for each in lost.values() if each.progress.tokens < each.tokens_at_death + _PAST}
        new -= tried
        if explained:
            guilty, self._explained_life = set(), life
        elif len(tried) > 1:
            guilty = new
        else:
            guilty = tried | new if tried else set(by_stream)
        weight = 2 if len(tried) == 1 and guilty == tried and self._alone else 1
        self._counted[rank] = life, guilty, weight
        failed = []
        suspected: dict[Stream, None] = {}
        for stream, numbers in by_stream.items():
            case = self._cases.setdefault(stream, _Case())
            case.ids.update(numbers)
            if stream in guilty:
                self._count(case, weight)
                for number in numbers:
                    lost[number].tokens_at_death = lost[number].progress.tokens
            if case.deaths > self.most:
                failed += numbers
            elif stream in tried or (stream in guilty and case.deaths >= _SUSPECT):
                if not case.in_group:
                    suspected[stream] = None
                case.in_group = True
                case.suspected.update(numbers)
            else:
                self._waiting.update(dict.fromkeys(numbers, stream))
        self._suspect_again([stream for stream in suspected if stream in tried])
        self._suspect([stream for stream in suspected if stream not in tried])
        if self._num_ended > max(_MOST_ENDED, self.most):
            failed += [number for case in self._cases.values() for number in case.suspected]
        self.wake()
        return failed

    def _count(self, case: _Case, weight: int) -> None:
        now = time.monotonic()
        case.deaths = weight if now - case.died_at > _FORGET_S else case.deaths + weight
        case.died_at = now

    def _end_of_trial(self, lost: Iterable[Stream]) -> set[Stream]:
        """The tried requests that were on an engine that has ended; the others are tried on."""
        trial = self._trial
        if trial is None or not (tried := trial.streams.intersection(lost)):
            return set()
        self._num_ended += 1
        trial.streams -= tried
        for stream in tried:
            case = self._cases[stream]
            for number in case.ids:
                trial.until.pop(number, None)
                if self._waiting.pop(number, None) is not None:
                    case.suspected.add(number)
        if not trial.until:
            self._trial = None
        return tried

    def _suspect(self, streams: list[Stream]) -> None:
        size = min(_TRIED_TOGETHER, max(len(streams) // 2, 1))
        self._groups.extend(streams[first : first + size] for first in range(0, len(streams), size))

    def _suspect_again(self, streams: list[Stream]) -> None:
        """Of requests that were tried together, try each half before all others; a single one after them."""
        half = len(streams) // 2
        if half:
            self._groups.extendleft((streams[half:], streams[:half]))
        elif streams:
            self._groups.append(streams)

    def wait(self, numbers: Iterable[int], stream: Stream) -> None:
        """These sequences of a request could not be sent, as the engine of others has ended."""
        case = self._cases.setdefault(stream, _Case())
        case.ids.update(numbers)
        if case.in_group:
            case.suspected.update(numbers)
        else:
            self._waiting.update(dict.fromkeys(numbers, stream))
        self.wake()

    def connected(self, rank: int, life: int) -> None:
        """An engine is ready. If its connection alone was lost, nothing has died."""
        if (found := self._counted.pop(rank, None)) is not None and found[0] == life:
            for stream in found[1]:
                if (case := self._cases.get(stream)) is not None:
                    case.deaths -= found[2]
        if not self._alone:
            self._try_from = time.monotonic() + random.uniform(0.0, _SPREAD_S)
        self.wake()

    # Sequences

    def wake(self) -> None:
        """Something has changed: see what may run."""
        self._changed.set()

    async def run(self, may_run: Callable[[], MayRun], send: Callable[[int], None]) -> None:
        """Until cancelled, call `send` with each sequence once it may run, between other tasks.

        `may_run()` tells that of each sequence for the engines that are ready at that moment. `send` calls
        `sent`, or `ended` for one that cannot be sent.
        """
        try:
            while True:
                # Engines also become ready again without a word: by their heartbeats.
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

    async def _send_due(self, may_run: Callable[[], MayRun], send: Callable[[int], None]) -> None:
        accepts, yielded_at = may_run(), time.monotonic()
        for number in self.due(accepts):
            if time.monotonic() - yielded_at > YIELD_S:
                await asyncio.sleep(0)
                accepts, yielded_at = may_run(), time.monotonic()
            if number in self._waiting and self._starting_ids < _MOST_STARTING_IDS and accepts(number):
                send(number)

    def due(self, may_run: MayRun) -> list[int]:
        """The waiting sequences to send now: all that may run."""
        if self._trial is None and time.monotonic() >= self._try_from:
            self._begin_trial(may_run)
        return [number for number in self._waiting if may_run(number)]

    def _begin_trial(self, may_run: MayRun) -> None:
        for place, group in enumerate(self._groups):
            streams = {stream for stream in group if any(map(may_run, self._cases[stream].suspected))}
            if streams:
                self._groups[place] = [stream for stream in group if stream not in streams]
                numbers = {number: stream for stream in streams for number in self._cases[stream].suspected}
                for stream in streams:
                    case = self._cases[stream]
                    case.in_group, case.suspected = False, set()
                self._waiting.update(numbers)
                self._trial = _Trial(streams, dict.fromkeys(numbers))
                break
        self._groups = deque(group for group in self._groups if group)

    def sent(self, number: int, sequence: Sequence, num_ids: int) -> None:
        """It was sent to an engine, with `num_ids` ids."""
        del self._waiting[number]
        self._starting[number] = num_ids
        self._starting_ids += num_ids
        if self._trial is not None and number in self._trial.until:
            self._trial.until[number] = sequence.progress.tokens + _PAST

    def advanced(self, number: int, num_tokens: int) -> None:
        """It has `num_tokens` tokens of output, one or more of them new."""
        self._started(number)
        if self._trial is not None and num_tokens >= (self._trial.until.get(number) or num_tokens + 1):
            self._passed(number)

    def ended(self, number: int, stream: Stream) -> None:
        """It has ended, for any reason."""
        if (case := self._cases.get(stream)) is None:
            return
        self._started(number)
        self._waiting.pop(number, None)
        self._passed(number)
        case.ids.discard(number)
        case.suspected.discard(number)
        if case.in_group and not case.suspected:
            case.in_group = False
            for group in self._groups:
                if stream in group:
                    group.remove(stream)
        if not case.ids:
            del self._cases[stream]

    def _passed(self, number: int) -> None:
        trial = self._trial
        if trial is None or number not in trial.until:
            return
        del trial.until[number]
        if not trial.until:
            self._trial, self._num_ended = None, 0
            self.wake()

    def _started(self, number: int) -> None:
        """It does not wait for its first token any more."""
        if (num_ids := self._starting.pop(number, None)) is not None:
            self._starting_ids -= num_ids
            self.wake()
