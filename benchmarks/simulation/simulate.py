"""The event loop: requests arrive, frontends route them, groups of engines step.

One clock and one heap. The same settings and seed give the same result. Frontends, messages between
processes and the host's own time are not modelled: a request reaches its engine at once, and the device
never waits for the host.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.engines import Cost, Engine, EngineSettings, Group
from benchmarks.simulation.requests import SimulatedRequest
from frontend.engine_client.dp_router import Charge, DPRouter, Policy, RoutedPrompt

__all__ = ["Outcome", "Simulation"]

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Outcome:
    """What a simulation gives; times are simulated seconds."""

    requests: int
    seconds: float
    """From the first arrival to the last token."""
    requests_per_second: float
    output_tokens_per_second: float
    ttft: dict[str, float]
    """Mean and percentiles of the time to the first token."""
    tpot: dict[str, float]
    """Mean and percentiles of the time for each later token of a request."""
    cached_share: float
    """Share of the prompt tokens that were found in prefix caches."""
    preemptions: int
    steps: int
    busy: float
    """Mean share of the time that an engine is in a step."""
    imbalance: float
    """Tokens computed by the engine that computed most, over the mean."""

    def to_dict(self) -> dict[str, object]:
        """The figures by name, for JSON."""
        return asdict(self)


@dataclass
class _Times:
    """Times and lengths of all requests, by their numbers."""

    arrived: NDArray[np.float64]
    first: NDArray[np.float64] = field(init=False)
    finished: NDArray[np.float64] = field(init=False)
    outputs: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.first = np.zeros_like(self.arrived)
        self.finished = np.zeros_like(self.arrived)
        self.outputs = np.zeros(len(self.arrived), np.int64)


class Simulation:
    """`ranks` engines and `frontends` frontends, each of which routes its own requests."""

    def __init__(
        self,
        settings: EngineSettings,
        cost: Cost,
        ranks: int = 1,
        policy: Policy = "prefix",
        frontends: int = 1,
        lockstep: bool = False,
    ):
        """With `lockstep` all engines are one group."""
        self.now = 0.0
        self.engines = [Engine(settings, lambda: self.now) for _ in range(ranks)]
        members = [self.engines] if lockstep else [[engine] for engine in self.engines]
        self._groups = [Group(each, cost) for each in members]
        self._group_of = [self._groups[0 if lockstep else rank] for rank in range(ranks)]
        self._routers = [DPRouter(policy, ranks, settings.block_size, index) for index in range(frontends)]
        self._ready = list(range(ranks))
        self._charges: dict[int, tuple[DPRouter, Charge]] = {}
        self._ends: list[tuple[float, int, Group]] = []
        self._events = 0

    def run(self, requests: Iterable[SimulatedRequest], count: int) -> Outcome:
        """Simulate `count` requests to the last token. Raises ValueError for one that no engine can hold."""
        times = _Times(np.zeros(count))
        number = -1
        for number, request in enumerate(requests):
            while self._ends and self._ends[0][0] <= request.at:
                self._finish_step(times)
            self.now = request.at
            times.arrived[number] = request.at
            times.outputs[number] = request.max_tokens
            self._arrive(number, request)
        if number + 1 != count:
            raise ValueError(f"{count} requests were announced, and {number + 1} arrived")
        while self._ends:
            self._finish_step(times)
        return self._outcome(times)

    def _arrive(self, number: int, request: SimulatedRequest) -> None:
        router = self._routers[number % len(self._routers)]
        charge = router.route(RoutedPrompt(request.prompt, request.max_tokens), self._ready)
        self._charges[number] = router, charge
        engine = self.engines[charge.rank]
        group = self._group_of[charge.rank]
        engine.add(number, request.prompt, request.max_tokens)
        engine.schedule()
        if not group.is_running:
            self._start(group)

    def _start(self, group: Group) -> None:
        seconds = group.start()
        if seconds is not None:
            self._events += 1
            heapq.heappush(self._ends, (self.now + seconds, self._events, group))

    def _finish_step(self, times: _Times) -> None:
        self.now, _, group = heapq.heappop(self._ends)
        first, finished = group.finish()
        for message in first:
            times.first[message.request_id] = self.now
        for end in finished:
            times.finished[end.request_id] = self.now
            router, charge = self._charges.pop(end.request_id)
            router.release(charge)
        self._start(group)

    def _outcome(self, times: _Times) -> Outcome:
        seconds = float(times.finished.max() - times.arrived.min())
        stats = [engine.stats() for engine in self.engines]
        later = times.outputs > 1
        tpot = (times.finished - times.first)[later] / (times.outputs[later] - 1)
        computed = np.array([engine.computed_tokens for engine in self.engines])
        return Outcome(
            requests=len(times.arrived),
            seconds=seconds,
            requests_per_second=len(times.arrived) / seconds,
            output_tokens_per_second=float(times.outputs.sum()) / seconds,
            ttft=_summary(times.first - times.arrived),
            tpot=_summary(tpot),
            cached_share=sum(one.prefix_hits for one in stats)
            / max(1, sum(one.prompt_tokens for one in stats)),
            preemptions=sum(one.preemptions for one in stats),
            steps=sum(one.steps for one in stats),
            busy=float(np.mean([group.busy_s for group in self._groups])) / seconds,
            imbalance=float(computed.max() / computed.mean()),
        )


def _summary(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Mean and percentiles; zeros for no values."""
    if not len(values):
        return {"mean": 0.0} | {f"p{percent}": 0.0 for percent in _PERCENTILES}
    found = np.percentile(values, _PERCENTILES)
    pairs = zip(_PERCENTILES, found, strict=True)
    return {"mean": float(np.mean(values))} | {f"p{percent}": float(value) for percent, value in pairs}
