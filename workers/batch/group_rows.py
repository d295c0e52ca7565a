"""Blocks or slots of the batch's rows in one KV group, and the inputs of its layers in a step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from atom_ops import StatePlan
from workers.layers.context import GroupContext

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, in the order of their tokens."""

    rows: Rows
    counts: Rows
    """Tokens that each row computes."""
    ends: Rows
    """Tokens of each row after the step."""
    decodes: NDArray[np.bool_]
    """Whether each row decodes: it computes its last id, and drafts."""
    device: torch.device
    split_tokens: int
    """For the attention plan."""
    ahead: NDArray[np.int32] | None = None
    """Tokens after its own that each token of the step sees; None: none."""


class GroupRows(ABC):
    """Blocks or slots of one group, by row; a row is cleared before a new request gets it."""

    @abstractmethod
    def clear(self, row: int) -> None: ...

    @abstractmethod
    def append(self, row: int, block_ids: Sequence[int]) -> None: ...

    @abstractmethod
    def token_columns(self, rows: Rows, positions: Rows) -> list[Rows]:
        """Columns to upload for the tokens at these rows and positions."""

    @abstractmethod
    def context(self, columns: Sequence[torch.Tensor], step: StepRows) -> GroupContext | StatePlan:
        """The input of the group's layers; `columns` are those of `token_columns`, on the device."""

    @abstractmethod
    def empty_context(self, device: torch.device, split_tokens: int) -> GroupContext | StatePlan:
        """The context of a step without rows."""

    @abstractmethod
    def device_table(self, device: torch.device) -> torch.Tensor:
        """The table on `device`, with one more row for padding; `update_device_table` keeps it up to date.

        The first call comes before any row has blocks; later ones return the same table.
        """

    @abstractmethod
    def update_device_table(self) -> None:
        """Copy the changes since the last call to the device, without waiting."""
