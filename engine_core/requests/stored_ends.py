"""Ends of requests that are sent once the blocks are stored: then another engine can go on with these."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from atom.shared.messages.engine import Finished, FinishReason
from atom.shared.utils.logger import RareWarning
from engine_core.requests.request import Request

__all__ = ["StoredEnds"]

_DEADLINE_S = 10.0
"""An end is not kept longer: what is not stored by then is computed again."""


@dataclass(frozen=True, slots=True)
class _End:
    request: Request
    finished: Finished
    deadline: float


class StoredEnds:
    """The ends that wait. A check costs their number."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._ends: list[_End] = []
        self._warning = RareWarning()

    def __len__(self) -> int:
        return len(self._ends)

    def hold(self, finished: Iterable[tuple[Request, Finished]]) -> list[tuple[Request, Finished]]:
        """Keep the ends of requests whose output goes on in another engine; returns the others."""
        others = []
        for request, end in finished:
            is_awaited = request.settings.stores_prompt and end.leased is None
            if is_awaited and end.reason is FinishReason.MAX_TOKENS:
                self._ends.append(_End(request, end, self._clock() + _DEADLINE_S))
            else:
                others.append((request, end))
        return others

    def take(self) -> list[tuple[Request, Finished]]:
        """The ends to send now, in their order."""
        if not self._ends:
            return []
        now = self._clock()
        due: list[_End] = []
        waiting: list[_End] = []
        for end in self._ends:
            num_left = end.request.blocks.shared_store.num_left
            if num_left and end.deadline <= now:
                self._warning.log(
                    f"{num_left} KV blocks of a prompt of {end.request.prompt_length} tokens were not stored "
                    f"within {_DEADLINE_S:.0f} s, so that the next engine computes them again: the tier is "
                    "slower than prompts are computed"
                )
            (waiting if num_left and end.deadline > now else due).append(end)
        self._ends = waiting
        return [(end.request, end.finished) for end in due]

    def drop(self, frontend: bytes) -> None:
        """Drop the ends of a frontend that is gone."""
        self._ends = [end for end in self._ends if end.request.frontend != frontend]
