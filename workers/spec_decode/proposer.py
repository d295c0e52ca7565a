"""What a speculation method does: it proposes the tokens that may follow each row's last one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from atom.messages.worker import NewRow
from atom_ops import RowState, StatePlan
from workers.layers.context import GroupContext


class Proposer(ABC):
    """One step calls `add_rows`, `add_tokens` and `propose`, in this order.

    Nothing here may wait for the device; graphs capture `add_tokens` and `propose`.
    """

    @abstractmethod
    def add_rows(self, new_rows: Sequence[NewRow]) -> None:
        """Rows that are assigned to new requests."""

    @abstractmethod
    def add_tokens(self, ids_T: torch.Tensor, groups: Sequence[GroupContext | StatePlan]) -> None:
        """The tokens that a step computes, drafts included, and the context of each KV group."""

    @abstractmethod
    def propose(self, rows_R: torch.Tensor, state: RowState, max_positions: int) -> None:
        """Write the drafts of these rows (int64) to `state.drafts_NK`.

        `max_positions` is more than the position of any row's last sampled id.
        """
