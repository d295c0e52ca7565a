"""Counters of a core since its start; `CoreStats` explains each of them."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    steps: int = 0
    preemptions: int = 0
    prefill_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    tier_hits: Counter[int] = field(default_factory=Counter)
    """Those of the prefix hits that came from each KV tier, by its index."""
    chunked_prefills: int = 0
    overlapped_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: Counter[int] = field(default_factory=Counter)
    """How many drafts had this many accepted tokens; without the drafts that had none."""

    def accepted_per_pos(self, num_drafts: int) -> list[int]:
        """Accepted draft tokens by place in their draft."""
        return [
            sum(drafts for accepted, drafts in self.num_accepted.items() if accepted > place)
            for place in range(num_drafts)
        ]
