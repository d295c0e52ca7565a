"""The block table of one KV group, on the host and, for graphs, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from atom_ops import empty_attention, plan_attention, to_device
from workers.batch.group_rows import GroupRows, Rows, StepRows
from workers.layers.context import GroupContext


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a step, and the size of a block."""

    max_rows: int
    max_model_len: int
    block_size: int
    num_drafts: int = 0
    """Most drafts of a row in a step."""

    @property
    def padding_row(self) -> int:
        """The row after all others, which never has a request."""
        return self.max_rows

    @property
    def max_context(self) -> int:
        """Length of the longest sequence, and of drafts after its end."""
        return self.max_model_len + self.num_drafts

    @property
    def num_entries(self) -> int:
        """Blocks of the longest context."""
        return -(-self.max_context // self.block_size)


class BlockTable(GroupRows):
    """Entry p // block_size of a row is the block of position p."""

    def __init__(self, limits: BatchLimits):
        self._block_size = limits.block_size
        self._num_drafts = limits.num_drafts
        self._blocks = np.zeros((limits.max_rows, limits.num_entries), np.int32)
        self._counts = np.zeros(limits.max_rows, np.int64)
        self._device_table: torch.Tensor | None = None
        self._changed: dict[int, int] = {}  # row -> first entry that differs on the device

    def clear(self, row: int) -> None:
        self._counts[row] = 0

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        start = int(self._counts[row])
        self._blocks[row, start : start + len(block_ids)] = block_ids
        self._counts[row] += len(block_ids)
        if self._device_table is not None:
            self._changed[row] = min(start, self._changed.get(row, start))

    def token_columns(self, rows: Rows, positions: Rows) -> list[Rows]:
        return [self.slots(rows, positions)]

    def context(self, columns: Sequence[torch.Tensor], step: StepRows) -> GroupContext:
        (slots_T,) = columns
        blocks = self.rows(step.rows, step.ends)
        counts = step.counts.astype(np.int32)
        ends = step.ends.astype(np.int32)
        width = 1 + self._num_drafts
        plan = plan_attention(counts, ends, blocks, step.device, step.split_tokens, width, step.ahead)
        return GroupContext(slots_T, plan)

    def empty_context(self, device: torch.device, split_tokens: int) -> GroupContext:
        no_slots = torch.empty(0, dtype=torch.int64, device=device)
        return GroupContext(no_slots, empty_attention(device, split_tokens))

    def rows(self, rows: Rows, context_lens: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tables of these rows, with as many entries as the longest context needs."""
        width = (int(context_lens.max()) - 1) // self._block_size + 1
        return self._blocks[:, :width].take(rows, axis=0)

    def slots(self, rows: Rows, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The KV slot of each (row, position)."""
        blocks = self._blocks[rows, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def device_table(self, device: torch.device) -> torch.Tensor:
        """int32 [max_rows + 1, entries]; the last row, for padding, remains 0."""
        rows, entries = self._blocks.shape
        if self._device_table is not None:
            return self._device_table
        self._device_table = torch.zeros(rows + 1, entries, dtype=torch.int32, device=device)
        return self._device_table

    def update_device_table(self) -> None:
        if self._device_table is None or not self._changed:
            return
        width = self._blocks.shape[1]
        changed_entries = [
            row * width + np.arange(start, self._counts[row], dtype=np.int64)
            for row, start in self._changed.items()
        ]
        where = np.concatenate(changed_entries)
        changed = to_device(np.stack((where, self._blocks.reshape(-1)[where])), self._device_table.device)
        self._device_table.view(-1).index_copy_(0, changed[0], changed[1].int())
        self._changed.clear()  # not before: the copy may fail for lack of memory
