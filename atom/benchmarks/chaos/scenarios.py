"""What happens in each scenario, and when."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["SCENARIOS", "Event", "Scenario"]

Target = Literal["worker", "core", "frontend"]


@dataclass(frozen=True)
class Event:
    """`at`: the part of all expected tokens that the streams have got then."""

    at: float
    action: Literal["kill", "stop", "pause", "stall", "flood", "poison", "memory", "disk"]
    """SIGKILL; SIGSTOP, until the server kills it; short pauses of random processes one after another, until
    the streams end; clients that do not read; many short requests; a request whose tokens each cost its
    engine a worker; memory of a process, or the size of any file of the server, that cannot grow."""
    target: Target | None = None
    """For signals and memory: a random process of that kind."""
    count: int = 1
    """Number of processes, clients or requests; of pauses at most."""

    def __str__(self) -> str:
        what = self.target or ("processes" if self.action in ("pause", "disk") else "clients")
        return f"{self.action} {self.count} {what} after {self.at:.0%} of the tokens"


@dataclass(frozen=True)
class Scenario:
    """A test of one requirement of docs/operate/reliability.md."""

    requirement: str
    summary: str
    events: tuple[Event, ...] = ()
    is_overload: bool = False
    """Instead of events: ten times the requests that the server can take."""


SCENARIOS = {
    "worker": Scenario("R1", "SIGKILL of a worker", (Event(0.3, "kill", "worker"),)),
    "core": Scenario("R2", "SIGKILL of an engine core", (Event(0.3, "kill", "core"),)),
    "pauses": Scenario("R3", "short pauses of random processes", (Event(0.0, "pause", count=1000),)),
    "hang": Scenario("R3", "SIGSTOP of a worker", (Event(0.3, "stop", "worker"),)),
    "core-hang": Scenario("R3", "SIGSTOP of an engine core", (Event(0.3, "stop", "core"),)),
    "frontend-hang": Scenario("R4", "SIGSTOP of a frontend", (Event(0.3, "stop", "frontend"),)),
    "frontend": Scenario("R4", "SIGKILL of a frontend", (Event(0.3, "kill", "frontend"),)),
    "twice": Scenario(
        "R1",
        "SIGKILL of a worker, then of a core",
        (Event(0.2, "kill", "worker"), Event(0.6, "kill", "core")),
    ),
    "memory": Scenario("R1", "a worker that gets no more memory", (Event(0.3, "memory", "worker"),)),
    "poison": Scenario("R7", "a request that ends its engine each time", (Event(0.2, "poison"),)),
    "disk": Scenario("R25", "no file of the server can grow", (Event(0.1, "disk"),)),
    "stalled": Scenario("R12", "clients that do not read", (Event(0.1, "stall", count=500),)),
    "overload": Scenario("R15", "ten times the requests that it can take", is_overload=True),
    "flood": Scenario("R13", "more requests than the queue takes", (Event(0.1, "flood", count=2048),)),
}
