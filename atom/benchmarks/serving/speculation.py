"""Acceptance of draft tokens, from the server's /metrics before and after a run."""

import re
from dataclasses import dataclass

import aiohttp

__all__ = ["Speculation", "read_speculation"]

_DEADLINE_S = 10.0
_COUNTERS = {
    "drafts": "spec_decode_num_drafts",
    "drafted": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
}


@dataclass(frozen=True)
class Speculation:
    """Counters since the start of the server; their differences are those of a run."""

    drafts: float
    drafted: float
    accepted: float
    forced_length: float | None = None
    """Mean tokens of a step on a server that forces acceptance; None: it verifies the drafts."""

    def __sub__(self, earlier: "Speculation") -> "Speculation":
        return Speculation(
            self.drafts - earlier.drafts,
            self.drafted - earlier.drafted,
            self.accepted - earlier.accepted,
            self.forced_length,
        )

    @property
    def accept_length(self) -> float | None:
        """Mean tokens per step, including the sampled one; None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens divided by all draft tokens; None without any."""
        return self.accepted / self.drafted if self.drafted else None

    @classmethod
    def parse(cls, exposition: str) -> "Speculation | None":
        """From Prometheus text, summed over labels; None without these counters."""
        sums = {}
        for field, name in _COUNTERS.items():
            values = re.findall(rf"^vllm:{name}_total(?:\{{.*\}})? (\S+)", exposition, re.MULTILINE)
            if not values:
                return None
            sums[field] = sum(map(float, values))
        forced = re.search(r"^atom:spec_decode_forced_length(?:\{.*\})? (\S+)", exposition, re.MULTILINE)
        return cls(**sums, forced_length=float(forced[1]) if forced else None)


async def read_speculation(session: aiohttp.ClientSession, base_url: str) -> Speculation | None:
    """The counters; None from a server without them or without /metrics."""
    timeout = aiohttp.ClientTimeout(total=_DEADLINE_S)
    try:
        async with session.get(f"{base_url}/metrics", timeout=timeout) as response:
            return Speculation.parse(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError):
        return None
