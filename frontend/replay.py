"""Sequences that run again after the end of their engine, and in which order.

A sequence is sent again as its prompt and the ids that it has emitted, so that its stream goes on where it
was. One that ends every engine that runs it must not end them for ever, nor fail with others in its place:

    deaths 1       it is sent again as soon as an engine is ready
    deaths 2, …    it is suspected, and tried: one such sequence at a time, until it has got past the place
                   where it died. An engine that ends meanwhile has ended because of it: no other sequence
                   counts this death
    the limit      it has died more often: it fails

Each is sent with all of its ids, also where a request of many sequences had one prompt for all, so only as
many at once as fit `_MOST_STARTING_IDS` until they have a token. `EngineClient` sends them.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from atom.utils.logger import get_logger
from frontend.engine_connection import YIELD_S

__all__ = ["Replays"]

_SUSPECT = 2
"""Deaths."""
_PAST = 16
"""New tokens after which a sequence has got past the place where it died: more than steps in flight give."""
_MOST_STARTING_IDS = 1 << 21
"""Prompt and output of the sequences that were sent again and have no new token; one alone may have more."""


@dataclass(slots=True)
class _Trial:
    """The suspected sequence that runs."""

    request_id: int
    life: int
    """Of the engine."""
    until: int
    """Tokens of its output with which it is past the place where it died."""


class Replays:
    """`most` is how often a sequence is sent again; 0 for never.

    `together`: engines with the same number of their life share their end, as those that share experts.
    """

    def __init__(self, most: int, together: bool = False):
        self._most = most
        self._together = together
        self._deaths: dict[int, int] = {}  # of the sequences that have died and not ended
        self._waiting: dict[int, None] = {}
        self._suspects: dict[int, None] = {}
        self._trial: _Trial | None = None
        self._starting: dict[int, int] = {}  # ids sent, by sequence
        self._starting_ids = 0
        self._explained_life = -1
        """The life that a suspected sequence has ended, where engines end together."""
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Sequences that wait for an engine."""
        return len(self._waiting) + len(self._suspects)

    @property
    def is_watching(self) -> bool:
        """Whether `advanced` must be called."""
        return self._trial is not None or bool(self._starting)

    @property
    def may_send(self) -> bool:
        """Whether there is room for another sequence that starts."""
        return self._starting_ids < _MOST_STARTING_IDS

    def deaths(self, request_id: int) -> int:
        """Engines that have ended under the sequence, and not because of another one."""
        return self._deaths.get(request_id, 0)

    def died(self, request_ids: Iterable[int], life: int) -> list[int]:
        """An engine has ended, and with it these sequences. Returns those that fail, the others wait."""
        ids = dict.fromkeys(request_ids)
        if not self._most:
            return list(ids)
        guilty = self._guilty(ids, life)
        failed = []
        for request_id in ids:
            self._started(request_id)
            counts = guilty is None or request_id == guilty
            deaths = self._deaths[request_id] = self.deaths(request_id) + counts
            if deaths > self._most:
                failed.append(request_id)
            elif counts and deaths >= _SUSPECT:
                self._suspects[request_id] = None
            else:
                self._waiting[request_id] = None
        if guilty in ids:
            self._trial = None
        self.wake()
        return failed

    def _guilty(self, ids: dict[int, None], life: int) -> int | None:
        """The suspected sequence that ran on this engine, or on one that ended with it."""
        trial = self._trial
        if trial is not None and (trial.request_id in ids or (self._together and trial.life == life)):
            self._explained_life = life
            return trial.request_id
        return -1 if self._together and life == self._explained_life else None

    def wake(self) -> None:
        """Something has changed, such as the engines that are ready: see what may run."""
        self._changed.set()

    async def run(self, may_run: Callable[[int], bool], send: Callable[[int], None]) -> None:
        """Until cancelled, call `send` with each sequence once `may_run` accepts it, between other tasks.

        `send` calls `sent`, or `ended` for one that cannot be sent.
        """
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                yielded_at = time.monotonic()
                for request_id in self.due(may_run):
                    if time.monotonic() - yielded_at > YIELD_S:
                        await asyncio.sleep(0)
                        yielded_at = time.monotonic()
                    waits = request_id in self._waiting or request_id in self._suspects
                    if waits and self.may_send and may_run(request_id):
                        send(request_id)
        except Exception:  # streams would wait forever: end the process, and so the server
            get_logger().critical("the frontend cannot send sequences again", exc_info=True)
            os._exit(1)

    def due(self, may_run: Callable[[int], bool]) -> list[int]:
        """The sequences to send now, of those that `may_run` accepts."""
        found = [request_id for request_id in self._waiting if may_run(request_id)]
        if self._trial is None:
            found += [next(filter(may_run, self._suspects))] if any(map(may_run, self._suspects)) else []
        return found

    def sent(self, request_id: int, life: int, num_tokens: int, num_ids: int) -> None:
        """It was sent to an engine in this life: `num_ids` ids, `num_tokens` of them output."""
        self._starting[request_id] = num_ids
        self._starting_ids += num_ids
        if request_id in self._suspects:
            del self._suspects[request_id]
            self._trial = _Trial(request_id, life, num_tokens + _PAST)
        else:
            del self._waiting[request_id]

    def advanced(self, request_id: int, num_tokens: int) -> None:
        """It has `num_tokens` tokens of output, one or more of them new."""
        self._started(request_id)
        trial = self._trial
        if trial is not None and trial.request_id == request_id and num_tokens >= trial.until:
            self._trial = None
            self.wake()

    def ended(self, request_id: int) -> None:
        """It has ended, for any reason."""
        if self._deaths.pop(request_id, None) is None:
            return
        self._waiting.pop(request_id, None)
        self._suspects.pop(request_id, None)
        self._started(request_id)
        if self._trial is not None and self._trial.request_id == request_id:
            self._trial = None
            self.wake()

    def _started(self, request_id: int) -> None:
        """It does not wait for its first token any more."""
        if (num_ids := self._starting.pop(request_id, None)) is not None:
            self._starting_ids -= num_ids
            self.wake()
