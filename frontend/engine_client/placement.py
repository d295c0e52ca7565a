"""Which engine runs a sequence: the router chooses among those that are ready, and counts what each runs."""

from collections.abc import Iterable, Mapping

from atom.shared.messages.engine import AddRequest, TokenDeltas
from frontend.engine_client.dp_router import DPRouter, RoutedPrompt
from frontend.engine_client.engine_connection import EngineConnection
from frontend.engine_client.engine_set import EngineSet
from frontend.engine_client.handover import Handovers, routed_prompt
from frontend.engine_client.sequence import RunningSequence
from frontend.metrics.metrics import Metrics

__all__ = ["Placement"]


class Placement:
    """Gives sequences their engines, and takes them away."""

    def __init__(self, engines: EngineSet, router: DPRouter, handovers: Handovers, metrics: Metrics):
        self._router = router
        self._engines = engines
        self._handovers = handovers
        self._metrics = metrics

    def send(self, request: AddRequest, sequences: Iterable[RunningSequence], ready: list[int]) -> None:
        """Send the request of `sequences`, which have no engine, to one of the ranks `ready`."""
        request, ready = self._handovers.place(request, ready)
        charge = self._router.route(routed_prompt(request), ready)
        self._metrics.engine(charge.rank).session_routed(charge.stays)
        engine = self._engines[charge.rank]
        for sequence in sequences:
            sequence.engine = engine
            sequence.rank = engine.rank
            sequence.charge = charge
            sequence.is_prefill = request.stores_prompt
            sequence.leased = None
        engine.link.send(request)

    def adopt(self, sequence: RunningSequence, engine: EngineConnection) -> None:
        """Note that `engine` runs a sequence that was sent by another frontend or connection."""
        request = sequence.state.request
        routed = RoutedPrompt(request.prompt_ids, sequence.num_left, 1, request.cache_salt)
        sequence.charge = self._router.route(routed, [engine.rank])
        sequence.engine = engine
        sequence.rank = engine.rank

    def leave(self, sequence: RunningSequence) -> None:
        """Note that a sequence runs no longer on its engine, if it had one."""
        if sequence.charge is not None:
            self._router.release(sequence.charge)
        sequence.engine = None
        sequence.charge = None

    def take_handed(
        self, deltas: TokenDeltas, sequences: Mapping[int, RunningSequence]
    ) -> tuple[list[RunningSequence], TokenDeltas]:
        """The sequences that go on in another engine, and the deltas without their ends."""
        return self._handovers.take(deltas, sequences)

    def forget(self, rank: int) -> None:
        """Forget what the engine of a rank had computed, which has ended."""
        self._router.forget(rank)
