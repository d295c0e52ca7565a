"""What one request has to do with KV tiers: what it loads before it runs, and what it stores meanwhile."""

from dataclasses import dataclass, field

__all__ = ["PrefixLookup", "SharedStore"]


@dataclass(slots=True)
class PrefixLookup:
    """How much of a waiting request's prefix is in the cache or in a tier. `TierLoads` moves it on.

        looking up ──▶ asking ────┐       the workers are asked what other engines have stored from there on
          ▲   │  └───▶ loading ──┐│       blocks that the cache lacks come back
          └───│──────────────────┴┘       all is looked up again
              ▼
            admitted                      nothing more is in a tier, or it has waited often enough

    While it asks or loads, the request is held, until the deadline of the question or load at most.
    """

    num_present: int = 0
    """Leading blocks that the cache or a tier had when they were looked up; before the first miss."""
    num_asked: int = 0
    """Leading blocks up to which the workers were asked: each is asked for once."""
    num_loads: int = 0
    """Loads that the request has waited for since it was queued."""
    num_loaded: list[int] = field(default_factory=list)
    """Blocks that each tier gave back, until its first admission."""

    def ask(self, count: int) -> None:
        """The request waits for what the workers say of the next `count` blocks."""
        self.num_asked = self.num_present + count
        self.num_present = 0

    def wait_for_load(self) -> None:
        """The request waits for a load."""
        self.num_loads += 1
        self.num_present = 0

    def admit(self) -> None:
        """The request runs. After a preemption all is looked up again: tiers may have lost blocks."""
        self.num_loads = 0
        self.num_present = 0


@dataclass(slots=True)
class SharedStore:
    """Blocks of a request for a tier in which other engines find them."""

    is_awaited: bool = False
    """Whether another engine goes on with the request as soon as they are stored."""
    num_pushed: int = 0
    """Leading blocks that were given to the tier while the request was running."""
    num_left: int = 0
    """Blocks that are still to be stored."""
