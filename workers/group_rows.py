"""What the rows of a batch own in one KV group, and what a step's layers must know of it."""

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
    """Tokens that each computes."""
    ends: Rows
    """Tokens that each has then."""
    device: torch.device
    split_tokens: int
    """Of the attention plan."""


class GroupRows(ABC):
    """One group's blocks or slots, by row; a request that takes a row clears it first."""

    @abstractmethod
    def clear(self, row: int) -> None: ...

    @abstractmethod
    def append(self, row: int, block_ids: Sequence[int]) -> None: ...

    @abstractmethod
    def token_columns(self, rows: Rows, positions: Rows) -> list[Rows]:
        """What the device must know of each token (given by row and position), to be uploaded with others."""

    @abstractmethod
    def context(self, columns: Sequence[torch.Tensor], step: StepRows) -> GroupContext | StatePlan:
        """What the group's layers are given; `columns` are those of `token_columns`, on the device."""

    @abstractmethod
    def mirror(self, device: torch.device) -> torch.Tensor:
        """By row, with one more for padding: what is owned, on `device`, where `refresh` brings what changed.

        To be asked for once, before any row owns anything.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Copy what changed since the last call into the mirror; waits for nothing."""
