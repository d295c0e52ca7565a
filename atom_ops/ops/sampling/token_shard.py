"""How ranks split the cached tokens of a sequence: position p is on rank p % ranks.

A block of the block table covers block_size * ranks positions. Each rank keeps block_size of them, in
its block of that number, so the ranks need one block table and no other. With 2 ranks and blocks of 2:

    position           0    1    2    3  |  4    5    6    7
    entry of the table       block 7     |       block 3
    slot (all ranks)  28   29   30   31  | 12   13   14   15
    slot on rank 0    14        15       |  6         7          block 7: slots 14, 15
    slot on rank 1         14        15  |       6         7     block 3: slots 6, 7
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

N = TypeVar("N", int, NDArray[np.int64], Tensor)


@dataclass(frozen=True, slots=True)
class TokenShard:
    """The tokens on one rank. A rank's tokens have an index of their own: 0 for its first one."""

    rank: int = 0
    ranks: int = 1

    def count(self, tokens: N) -> N:
        """How many of the first `tokens` positions are on this rank: the index of the next one."""
        return tokens if self.ranks == 1 else (tokens + (self.ranks - 1 - self.rank)) // self.ranks

    def position(self, index: N) -> N:
        """The position of this rank's token of that index."""
        return index if self.ranks == 1 else index * self.ranks + self.rank

    def own_slots(self, slots_T: Tensor) -> Tensor:
        """Slots on this rank from those of all ranks; -1 for padding and for tokens of other ranks."""
        if self.ranks == 1:
            return slots_T
        return (slots_T // self.ranks).masked_fill(slots_T % self.ranks != self.rank, -1)


ALL_TOKENS = TokenShard()
"""One rank has them all."""
