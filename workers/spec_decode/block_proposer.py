"""Drafts of a model that computes a whole block in one pass.

    position           s        s+1      s+2      s+3
    step computes      last id  draft 1  draft 2  draft 3          K = 3; s + 2 is the row's last id then:
    follow             ●        ●        (●)      (●)              caches the target's hidden states
    block                                last id  mask    mask    mask     one pass; drafts of s+3, s+4, s+5
    or, first_draft 0                    last id  mask    mask             each gives the draft after it

What `follow` caches for rejected drafts, and what a block caches, is overwritten by `follow` before a row's
context reaches it: a block's keys and values are those of its last id and masks.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from atom_ops import NO_DRAFT, RowState, SamplingBatch, draft_inputs
from workers.batch.block_table import BatchLimits
from workers.batch.group_rows import GroupRows
from workers.layers.context import ForwardContext, GroupContext
from workers.spec_decode.block_attention import Blocks
from workers.spec_decode.draft_rows import Computed, Sampled
from workers.spec_decode.drafter import BlockDrafter, rooms
from workers.spec_decode.proposer import Proposer


class BlockProposer(Proposer):
    """The proposer of methods that draft in blocks."""

    runs_model = True

    def __init__(
        self,
        drafter: BlockDrafter,
        limits: BatchLimits,
        tables: Sequence[GroupRows],
        device: torch.device,
        exact: bool | None = None,
    ):
        """`tables` of all KV groups; `exact` as in `ModelProposer`."""
        # One pass, whatever the number of drafts: its cost is shared by them.
        self.cost = drafter.block_cost / limits.num_drafts + drafter.draft_cost
        self._drafter = drafter
        self._limits = limits
        self._tables = {group: tables[group].device_table(device) for group in drafter.groups}
        self._exact = device.type == "cpu" if exact is None else exact
        self._step: tuple[ForwardContext, SamplingBatch] | None = None

    def observe(self, computed: Computed, sampled: Sampled | None) -> None:
        self._drafter.follow(computed)
        self._step = None if sampled is None else (computed.context, sampled.settings)

    def propose(
        self,
        rows_R: torch.Tensor,
        state: RowState,
        max_positions: int,
        allowed_R: torch.Tensor | None = None,
    ) -> None:
        assert self._step is not None, "observe comes first"
        step, settings = self._step
        self._step = None
        room_R = rooms(rows_R, state)
        if allowed_R is not None:
            room_R = torch.minimum(room_R, allowed_R)
        if self._exact:  # no padding is computed
            drafting = (room_R > 0).nonzero()[:, 0]
            state.drafts_NK.index_fill_(0, rows_R, NO_DRAFT)
            if not len(drafting):
                return
            settings = settings.select(drafting)
            room_R = room_R[drafting]
            rows_R = rows_R[drafting]
        drafts_RK = self._drafts(rows_R, room_R, state, settings, step, max_positions)
        state.drafts_NK.index_copy_(0, rows_R, drafts_RK)

    def _drafts(
        self,
        rows_R: torch.Tensor,
        room_R: torch.Tensor,
        state: RowState,
        settings: SamplingBatch,
        step: ForwardContext,
        max_positions: int,
    ) -> torch.Tensor:
        """int64 [R, K]."""
        drafts = self._limits.num_drafts
        first = self._drafter.first_draft
        last_R = state.positions_N.index_select(0, rows_R)
        ids_R = state.ids_N.index_select(0, rows_R)
        blocks = RowState(
            ids_R,
            last_R.masked_fill(room_R <= 0, -1),
            state.limits_N.index_select(0, rows_R),
            last_R.new_full((len(rows_R), drafts), self._drafter.mask_id),
        )
        ids_T, positions_T, context = self._block(rows_R, blocks, step, max_positions + drafts)
        hidden_TD = self._drafter.predict(ids_T, positions_T, context)
        hidden_RKD = hidden_TD.view(len(rows_R), first + drafts, -1)[:, first:]
        number_K = torch.arange(drafts, device=rows_R.device)
        positions_RK = (last_R[:, None] + 1 + number_K).clamp(min=0)
        drafts_RK = self._drafter.sample(hidden_RKD, ids_R, settings, positions_RK)
        return drafts_RK.masked_fill(number_K >= room_R[:, None], NO_DRAFT)

    def _block(
        self, rows_R: torch.Tensor, blocks: RowState, step: ForwardContext, max_context: int
    ) -> tuple[torch.Tensor, torch.Tensor, ForwardContext]:
        """Ids, positions and context of the tokens of all blocks."""
        width = self._drafter.first_draft + self._limits.num_drafts
        longest = min(max_context, self._limits.max_context)
        all_R = torch.arange(len(rows_R), device=rows_R.device)
        groups = list(step.groups)
        ids_T = positions_T = rows_R
        for (group, table_NW), view in zip(self._tables.items(), self._drafter.views, strict=True):
            of_step = groups[group]
            assert isinstance(of_step, GroupContext), "states have no drafts"
            table_RW = table_NW.index_select(0, rows_R)
            inputs = draft_inputs(all_R, blocks, table_RW, self._limits.block_size, width - 1)
            ids_T = inputs.ids_T
            positions_T = inputs.positions_T
            # What comes after a row's limit has no slot, and is in no context.
            contexts_R = torch.minimum(inputs.contexts_R, (blocks.limits_N - 1).clamp(min=0).int())
            table_RW = inputs.table_RW[:, : -(-longest // self._limits.block_size)]
            found = Blocks(
                width, blocks.positions_N, contexts_R, table_RW, longest, of_step.plan.split_tokens
            )
            groups[group] = GroupContext(inputs.slots_T, found.plan(view, self._exact))
        return ids_T, positions_T, replace(step, groups=groups, splitter=None)
