"""The event log: what has changed between two looks at the ranks and at the metrics."""

from collections.abc import Iterator, Sequence

from frontend.metrics.metrics import Metrics
from frontend.status.records import Event, Rank

__all__ = ["EventLog"]

_COUNTED = (
    ("refused", "refused", "{} refused: the server is full"),
    ("output_limited", "output_limited", "{} ended: too much output waited to be sent"),
    ("stalled", "stalled_client", "{} disconnected: the client did not read its response"),
    ("restarts", "frontend", "frontend restarts: {}"),
)
"""(field of Metrics, kind of event, text)."""


class EventLog:
    """Compares each look with the one before; the first look makes no events of counts."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[int, str]] = {}
        self._counts: dict[str, int] | None = None

    def changes(self, at: float, ranks: Sequence[Rank], metrics: Metrics) -> list[Event]:
        """The events since the last call; at most one for each rank and each counter."""
        return [*self._of_ranks(at, ranks), *self._of_counts(at, metrics)]

    def _of_ranks(self, at: float, ranks: Sequence[Rank]) -> Iterator[Event]:
        for rank in ranks:
            seen = (rank.life, rank.state)
            if self._ranks.get(rank.rank) == seen:
                continue
            self._ranks[rank.rank] = seen
            life = f" (life {rank.life})" if rank.life else ""
            yield Event(at, rank.state, f"{rank.state}{life}{rank.reason and ': '}{rank.reason}", rank.rank)

    def _of_counts(self, at: float, metrics: Metrics) -> Iterator[Event]:
        counts = {field: getattr(metrics, field) for field, _, _ in _COUNTED}
        before = self._counts
        self._counts = counts
        if before is None:
            return
        for field, kind, text in _COUNTED:
            if (more := counts[field] - before[field]) > 0:
                yield Event(at, kind, text.format(more))
