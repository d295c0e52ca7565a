"""What a speculation method does: it proposes the tokens that may follow each row's last one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from atom.shared.messages.worker import KVSpec, NewRow
from atom_ops import RowState, StatePlan
from workers.batch.block_table import BatchLimits
from workers.batch.group_rows import GroupRows
from workers.batch.image_rows import ImageRows
from workers.layers.context import GroupContext
from workers.spec_decode.draft_passes import DraftPasses
from workers.spec_decode.draft_rows import Computed, Sampled


class Method(ABC):
    """A speculation method, configured for one model."""

    @abstractmethod
    def kv_specs(self, specs: Sequence[KVSpec]) -> list[KVSpec]:
        """The KV specs of the model's groups, with the memory that this method needs for each block."""

    @abstractmethod
    def proposer(
        self,
        limits: BatchLimits,
        tables: Sequence[GroupRows],
        num_blocks: Sequence[int],
        device: torch.device,
    ) -> "Proposer":
        """The proposer for an empty batch; `tables` and `num_blocks` of each KV group."""


class Proposer(ABC):
    """One step calls `add_rows`, `add_tokens`, `observe` and, if it samples, `record_outputs` and `propose`.

    They are called in this order. None may wait for the device; graphs capture all but `add_rows`.
    """

    runs_model: bool = False
    """Whether a model drafts: `observe` needs the sampling settings of the rows."""
    cost: float = 0.0
    """Time to propose one more draft of all rows, as a fraction of the time of a step without drafts."""
    records_outputs: bool = False
    """Whether `record_outputs` is called."""
    reads_next_ids: bool = False
    """Whether every batch has the id after each prompt chunk."""
    passes: DraftPasses | None = None
    """What the ranks of engines in lockstep agree on; None: the drafts of a rank need no other one."""
    images: ImageRows | None = None
    """The images of the batch's rows; None: the model reads none."""

    def add_rows(self, new_rows: Sequence[NewRow]) -> None:  # noqa: B027 - a model's cache is in blocks
        """Rows that are assigned to new requests."""

    def add_tokens(  # noqa: B027 - a model gets them from `observe`
        self, ids_T: torch.Tensor, groups: Sequence[GroupContext | StatePlan]
    ) -> None:
        """The tokens that a step computes, drafts included, and the context of each KV group."""

    def kept(self, group: int) -> Sequence[torch.Tensor]:
        """What it keeps for the blocks of a KV group besides the caches of layers: [blocks, ...] each."""
        return ()

    def observe(  # noqa: B027 - methods that read the text alone need nothing of it
        self, computed: Computed, sampled: Sampled | None
    ) -> None:
        """Follow what a step has computed, and sampled after it; None if it sampled nothing.

        The rows are at their last sampled tokens by now.
        """

    def join_passes(self) -> None:  # noqa: B027 - without `passes` there are none
        """Take part in the other ranks' predictions, after a step that sampled nothing."""

    def record_outputs(  # noqa: B027 - most methods need nothing of it
        self, rows_R: torch.Tensor, ids_RJ: torch.Tensor, counts_R: torch.Tensor
    ) -> None:
        """Note what rows have sampled in a step: the first `counts_R` of their `ids_RJ`; all int64.

        Padding, and a row at its limit, have a count of 0.
        """

    @abstractmethod
    def propose(
        self,
        rows_R: torch.Tensor,
        state: RowState,
        max_positions: int,
        allowed_R: torch.Tensor | None = None,
    ) -> None:
        """Write the drafts of these rows (int64) to `state.drafts_NK`.

        `allowed_R` (int64, on the host): how many of a row's drafts will be used, None: all. A row for which
        that is 0 may keep earlier drafts, and nothing needs to be computed for it.
        `max_positions` is more than the position of any row's last sampled id.
        """
