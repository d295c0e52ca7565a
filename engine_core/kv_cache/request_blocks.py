"""The block tables of one request, and the digests of its full blocks."""

from dataclasses import dataclass, field

from atom.shared.messages.admin import Miss
from engine_core.kv_tiers.request_tiers import PrefixLookup, SharedStore
from engine_core.requests.token_ids import TokenIds

__all__ = ["RequestBlocks"]


@dataclass(slots=True)
class RequestBlocks:
    """The block tables of one request, and the digests of its full blocks."""

    tokens: TokenIds
    in_prompt: int
    """Full blocks of the prompt; `tokens.prompt` has their digests."""
    tables: list[list[int]]
    first_live: list[int]
    """For each group: entries of the table before this one are placeholders."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of the full blocks after those of the prompt."""
    hash_inputs: list[bytes] = field(default_factory=list)
    num_found: int = 0
    """Leading blocks that `find_prefix` has found so far."""
    num_cached: int = 0
    """Leading blocks that have been cached, or were found in the cache."""
    collided: bool = False
    """One digest collides with that of another cached content: nothing more may be cached."""
    miss: Miss | None = None
    """Why the cached prefix ended at the first admission; None before it."""
    missed_block: int = -1
    """The first block that was not cached then; -1 if all that may be were."""
    num_hits: int = 0
    """Leading blocks that were cached at the latest admission."""
    lookup: PrefixLookup = field(default_factory=PrefixLookup)
    shared_store: SharedStore = field(default_factory=SharedStore)
    shared_step: int = 0
    """The last unconfirmed step, at admission, that writes one of the shared blocks; 0 if there is none."""

    @property
    def num_hashed(self) -> int:
        """Leading blocks that have a digest."""
        return self.in_prompt + len(self.digests) if self.digests else len(self.tokens.prompt.digests)

    def hashes(self, start: int, end: int) -> tuple[list[bytes], list[bytes]]:
        """Digests and hash inputs of these blocks."""
        prompt = self.tokens.prompt
        length = len(prompt.digests)
        if start >= length:
            own = slice(start - length, end - length)
            return self.digests[own], self.hash_inputs[own]
        digests = prompt.digests[start:end]
        hash_inputs = prompt.hash_inputs[start:end]
        if end > length:
            digests += self.digests[: end - length]
            hash_inputs += self.hash_inputs[: end - length]
        return digests, hash_inputs
