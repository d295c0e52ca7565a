"""The state slot of every row in a group of recurrent layers, on the host and, for graphs, on the device."""

from collections.abc import Sequence

import numpy as np
import torch

from atom.shared.messages.worker import StateCopy
from atom_ops import StateLayer, StatePlan, empty_states, plan_states, to_device
from workers.batch.block_table import BatchLimits
from workers.batch.draft_states import draft_states
from workers.batch.group_rows import GroupRows, Rows, StepRows
from workers.layers.attention.cache_groups import CacheGroup, StateGroup
from workers.layers.context import CacheLayer

NO_SLOT = -1


class StateSlots(GroupRows):
    """Each row has one slot for its state, from its first token on.

    With drafts a slot has room for 1 + K states, see `workers.batch.draft_states`.
    """

    accepted_N: torch.Tensor | None = None
    """int64: accepted drafts of each row's last step; None without drafts."""

    def __init__(self, limits: BatchLimits):
        self.places = 1 + limits.num_drafts
        self._slots = np.full(limits.max_rows, NO_SLOT, np.int64)
        self._device_table: torch.Tensor | None = None
        self._changed: set[int] = set()  # rows whose slot differs on the device

    def clear(self, row: int) -> None:
        self._slots[row] = NO_SLOT

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Raises ValueError for a second slot."""
        if not block_ids:
            return
        if len(block_ids) > 1 or self._slots[row] != NO_SLOT:
            raise ValueError(f"row {row}: a request has one slot for its state")
        self._slots[row] = block_ids[0]
        if self._device_table is not None:
            self._changed.add(row)

    def token_columns(self, rows: Rows, positions: Rows) -> list[Rows]:
        return []

    def context(self, columns: Sequence[torch.Tensor], step: StepRows) -> StatePlan:
        if self.accepted_N is not None:
            return draft_states(step, self._slots[step.rows], self.places, self.accepted_N)
        is_fresh = step.ends == step.counts
        return plan_states(step.counts.astype(np.int32), self._slots[step.rows], is_fresh, step.device)

    def empty_context(self, device: torch.device, split_tokens: int) -> StatePlan:
        return empty_states(device)

    def device_table(self, device: torch.device) -> torch.Tensor:
        """int64 [max_rows + 1]; padding never has a slot."""
        if self._device_table is not None:
            return self._device_table
        self._device_table = torch.full((len(self._slots) + 1,), NO_SLOT, dtype=torch.int64, device=device)
        return self._device_table

    def update_device_table(self) -> None:
        if self._device_table is None or not self._changed:
            return
        rows = np.array(sorted(self._changed), np.int64)
        changed = to_device(np.stack((rows, self._slots[rows])), self._device_table.device)
        self._device_table.index_copy_(0, changed[0], changed[1])
        self._changed.clear()  # not before: the copy may fail for lack of memory


def copy_states(
    copies: Sequence[StateCopy], groups: Sequence[CacheGroup], layers: Sequence[CacheLayer]
) -> None:
    """Copy states between slots, in all layers of their groups; reads all before it writes any.

    `layers` are the caches by layer index.
    """
    for number, group in enumerate(groups):
        if not isinstance(group, StateGroup):
            continue
        # States are copied after prompt chunks and before the first token, when they are at the first place.
        pairs = ((copy.source, copy.target) for copy in copies if copy.group == number)
        slots = [(source * group.places, target * group.places) for source, target in pairs]
        if not slots:
            continue
        caches = [layers[layer] for layer in group.layers]
        (sources_K, targets_K) = to_device(np.array(slots, np.int64).T.copy(), _device(caches))
        for cache in caches:
            assert isinstance(cache, StateLayer), "copies are of states"
            for states in (cache.conv, cache.recurrent):
                states.index_copy_(0, targets_K, states.index_select(0, sources_K))


def _device(caches: Sequence[CacheLayer]) -> torch.device:
    first = caches[0]
    assert isinstance(first, StateLayer), "copies are of states"
    return first.conv.device
