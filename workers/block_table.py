"""The blocks of every row in one KV group, on the host and, where asked for, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from atom_ops import plan_attention, to_device
from workers.group_rows import GroupRows, Rows, StepRows
from workers.layers.context import GroupContext


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Sizes that no step exceeds, and the units of the tables."""

    max_rows: int
    max_model_len: int
    block_size: int

    @property
    def padding_row(self) -> int:
        """A row behind all others that never holds a request."""
        return self.max_rows

    @property
    def num_entries(self) -> int:
        """Blocks that the longest sequence takes."""
        return -(-self.max_model_len // self.block_size)


class BlockTable(GroupRows):
    """Position p of a row lives in the block of its entry p // block_size."""

    def __init__(self, limits: BatchLimits):
        self._block_size = limits.block_size
        self._blocks = np.zeros((limits.max_rows, limits.num_entries), np.int32)
        self._counts = np.zeros(limits.max_rows, np.int64)
        self._mirror: torch.Tensor | None = None
        self._stale: dict[int, int] = {}  # row -> its first entry that the mirror lacks

    def clear(self, row: int) -> None:
        self._counts[row] = 0

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        start = int(self._counts[row])
        self._blocks[row, start : start + len(block_ids)] = block_ids
        self._counts[row] += len(block_ids)
        if self._mirror is not None:
            self._stale[row] = min(start, self._stale.get(row, start))

    def token_columns(self, rows: Rows, positions: Rows) -> list[Rows]:
        return [self.slots(rows, positions)]

    def context(self, columns: Sequence[torch.Tensor], step: StepRows) -> GroupContext:
        (slots_T,) = columns
        blocks = self.rows(step.rows, step.ends)
        counts, ends = step.counts.astype(np.int32), step.ends.astype(np.int32)
        return GroupContext(slots_T, plan_attention(counts, ends, blocks, step.device, step.split_tokens))

    def rows(self, rows: Rows, context_lens: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tables of these rows, as wide as the longest context needs."""
        width = (int(context_lens.max()) - 1) // self._block_size + 1
        return self._blocks[:, :width].take(rows, axis=0)

    def slots(self, rows: Rows, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the token of each (row, position) is kept."""
        blocks = self._blocks[rows, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def mirror(self, device: torch.device) -> torch.Tensor:
        """int32 [max_rows + 1, entries]; the last row, of padding, stays 0."""
        rows, entries = self._blocks.shape
        self._mirror = torch.zeros(rows + 1, entries, dtype=torch.int32, device=device)
        return self._mirror

    def refresh(self) -> None:
        if self._mirror is None or not self._stale:
            return
        width = self._blocks.shape[1]
        pieces = [
            row * width + np.arange(start, self._counts[row], dtype=np.int64)
            for row, start in self._stale.items()
        ]
        where = np.concatenate(pieces)
        changed = to_device(np.stack((where, self._blocks.reshape(-1)[where])), self._mirror.device)
        self._mirror.view(-1).index_copy_(0, changed[0], changed[1].int())
        self._stale.clear()  # not before: the copy may fail for lack of memory
