"""One sequence of a request, from its start to its end, over all engines that run it."""

from dataclasses import dataclass

from frontend.engine_client.dp_router import Charge
from frontend.engine_client.engine_connection import EngineConnection
from frontend.engine_client.streams import Stream
from frontend.metrics.metrics import Progress, RunningRequest

__all__ = ["Sequence"]


@dataclass(slots=True)
class Sequence:
    """One sequence that an engine generates, or that waits for an engine."""

    stream: Stream
    progress: Progress
    wanted: int | None
    """The rank that its client chose."""
    rank: int = 0
    """Of its engine, or of the last one."""
    engine: EngineConnection | None = None
    charge: Charge | None = None
    replays: int = 0
    """How often it was sent again."""
    tokens_at_death: int = 0
    """Tokens that it had when an engine last ended that it may have ended."""

    def shown(self, number: int) -> RunningRequest:
        progress = self.progress
        return RunningRequest(number, self.rank, progress.prompt_tokens, progress.tokens, progress.arrived_at)
