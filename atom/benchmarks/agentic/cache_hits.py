"""Hits of the prefix cache by tier, from the server's /metrics before and after a run."""

import re
from dataclasses import dataclass, field

import aiohttp

__all__ = ["CacheHits", "read_cache_hits"]

_DEADLINE_S = 10.0


@dataclass(frozen=True)
class CacheHits:
    """Prompt tokens since the start of the server; their differences are those of a run."""

    queries: float
    """Tokens that were looked up."""
    hits: float
    """Those that were found."""
    tiers: dict[str, float] = field(default_factory=dict)
    """Those that came from each KV tier, by its name; the others were in the device's cache."""

    def __sub__(self, earlier: "CacheHits") -> "CacheHits":
        tiers = {name: count - earlier.tiers.get(name, 0) for name, count in self.tiers.items()}
        return CacheHits(self.queries - earlier.queries, self.hits - earlier.hits, tiers)

    @property
    def rates(self) -> dict[str, float]:
        """Fractions of the tokens looked up that each tier had; GPU is the device's cache, also a CPU's."""
        if not self.queries:
            return {}
        device = self.hits - sum(self.tiers.values())
        return {name: count / self.queries for name, count in {"GPU": device, **self.tiers}.items()}

    @classmethod
    def parse(cls, exposition: str) -> "CacheHits | None":
        """From Prometheus text, summed over engines; None without these counters."""
        queries = _values(exposition, "vllm:prefix_cache_queries")
        hits = _values(exposition, "vllm:prefix_cache_hits")
        if not queries or not hits:
            return None
        tiers: dict[str, float] = {}
        for labels, value in _values(exposition, "atom:kv_tier_hits"):
            found = re.search(r'tier="([^"]*)"', labels)
            if found is not None:
                tiers[found[1]] = tiers.get(found[1], 0) + value
        return cls(sum(value for _, value in queries), sum(value for _, value in hits), tiers)


async def read_cache_hits(session: aiohttp.ClientSession, base_url: str) -> CacheHits | None:
    """The counters; None from a server without them or without /metrics."""
    timeout = aiohttp.ClientTimeout(total=_DEADLINE_S)
    try:
        async with session.get(f"{base_url}/metrics", timeout=timeout) as response:
            return CacheHits.parse(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError):
        return None


def _values(exposition: str, name: str) -> list[tuple[str, float]]:
    """(labels, value) of each sample of a counter."""
    lines = re.findall(rf"^{name}_total(\{{.*\}})? (\S+)", exposition, re.MULTILINE)
    return [(labels, float(value)) for labels, value in lines]
