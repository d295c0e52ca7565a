"""Sequences that run again after the end of their engine, and in which order.

A sequence is sent again as its prompt and the ids that it has emitted, so that its stream goes on where it
was. One that ends every engine that runs it must not end them for ever, nor fail with others in its place:

    deaths 1       it is sent again as soon as an engine is ready
    deaths 2, …    it is suspected, and tried: one such sequence at a time, until it has got past the place
                   where it died. An engine that ends meanwhile has ended because of it: no other sequence
                   counts this death
    the limit      it has died more often: it fails

This module sends nothing: see `EngineClient`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["Replays"]

_SUSPECT = 2
"""Deaths."""
_PAST = 16
"""New tokens after which a sequence has got past the place where it died: more than steps in flight give."""


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
        self._explained_life = -1
        """The life that a suspected sequence has ended, where engines end together."""

    def __len__(self) -> int:
        """Sequences that wait for an engine."""
        return len(self._waiting) + len(self._suspects)

    @property
    def has_trial(self) -> bool:
        """Whether a suspected sequence runs."""
        return self._trial is not None

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
        return failed

    def _guilty(self, ids: dict[int, None], life: int) -> int | None:
        """The suspected sequence that ran on this engine, or on one that ended with it."""
        trial = self._trial
        if trial is not None and (trial.request_id in ids or (self._together and trial.life == life)):
            self._explained_life = life
            return trial.request_id
        return -1 if self._together and life == self._explained_life else None

    def due(self, may_run: Callable[[int], bool]) -> list[int]:
        """The sequences to send now, of those that `may_run` accepts."""
        found = [request_id for request_id in self._waiting if may_run(request_id)]
        if self._trial is None:
            found += [next(filter(may_run, self._suspects))] if any(map(may_run, self._suspects)) else []
        return found

    def sent(self, request_id: int, life: int, num_tokens: int) -> None:
        """It was sent to an engine in this life, after `num_tokens` tokens of output."""
        if request_id in self._suspects:
            del self._suspects[request_id]
            self._trial = _Trial(request_id, life, num_tokens + _PAST)
        else:
            del self._waiting[request_id]

    def advanced(self, request_id: int, num_tokens: int) -> bool:
        """It has `num_tokens` tokens of output; whether another suspected sequence may be due now."""
        trial = self._trial
        if trial is None or trial.request_id != request_id or num_tokens < trial.until:
            return False
        self._trial = None
        return bool(self._suspects)

    def ended(self, request_id: int) -> bool:
        """It has ended, for any reason; whether another suspected sequence may be due now."""
        if self._deaths.pop(request_id, None) is None:
            return False
        self._waiting.pop(request_id, None)
        self._suspects.pop(request_id, None)
        if self._trial is None or self._trial.request_id != request_id:
            return False
        self._trial = None
        return bool(self._suspects)
