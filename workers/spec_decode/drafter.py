"""Drafts of a model: it follows every step's tokens, then predicts several more of each row.

    position           s        s+1      s+2      s+3      s+4      s+5
    step computes      last id  draft 1  draft 2  draft 3                     K = 3; two drafts are right:
    and samples        s+1 ✓    s+2 ✓    s+3      (s+4)                       s + 3 is the row's last id, p
    follow             ●        ●        ●        (●)                         same tokens, plan and slots
    predict                                       ● p      ● p+1    (● p+2)   one token of each row at a time

`follow` fills the model's own KV for all tokens of the step. What it writes for rejected drafts is
overwritten by `predict`, or in the next step, before a row's context reaches it. `predict` writes to
positions after those of the step: the engine core has blocks for them (`Limits.lookahead`). Recurrent states
are kept for each token of the step, and those of `predict` are forgotten (`workers.batch.draft_states`).

A model of pairs reads the hidden state of a token and the id after it; its cache has the pair in the slot of
the former. So it is one token ahead: the first draft comes from `follow`. A block of the prefix cache may be
continued by another token than the one that its last pair was computed with; then that pair is a slightly
worse context for drafts, and no output changes.

Drafts are sampled as the target samples, with the row's settings, seed and the position's noise. So they are
the target's tokens wherever both models have nearly the same logits, with any temperature.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from atom.shared.messages.worker import KVSpec
from atom_ops import (
    NO_DRAFT,
    AttentionPlan,
    RowState,
    SamplingBatch,
    StatePlan,
    draft_inputs,
    plan_attention,
)
from workers.batch.block_table import BatchLimits
from workers.batch.draft_states import predicting_states
from workers.batch.group_rows import GroupRows
from workers.batch.state_slots import NO_SLOT, StateSlots
from workers.batch.step_padding import pad_groups
from workers.layers.context import ForwardContext, GroupContext
from workers.layers.embedding import VocabEmbedding
from workers.layers.weighted import WeightedLayer
from workers.spec_decode.draft_passes import DraftPasses
from workers.spec_decode.draft_rows import Computed, Sampled
from workers.spec_decode.proposer import Method, Proposer


class Drafter(ABC):
    """A model that drafts. T tokens, R rows, D hidden."""

    groups: Sequence[int]
    """Numbers of the KV groups, among all of the step's, that it caches in."""
    reads_pairs: bool
    """Whether it computes a token's hidden state together with the id after it."""
    cost: float
    """Time of one `predict` and `sample`, as a fraction of a step without drafts."""

    @abstractmethod
    def follow(self, computed: Computed, next_ids_T: torch.Tensor) -> torch.Tensor:
        """Compute the tokens of a step; hidden states [T, D].

        `next_ids_T` (int64): the id after each token; any id after a rejected draft, or padding.
        """

    @abstractmethod
    def predict(
        self, ids_R: torch.Tensor, hidden_RD: torch.Tensor, positions_R: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Hidden states [R, D] of one more token of each row, whose RoPE positions are `positions_R`.

        `hidden_RD`: with `reads_pairs` those of the token before, from `follow` or from here; otherwise any.
        """

    @abstractmethod
    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        """Ids of the target's vocabulary, int64 [R], sampled at these positions."""


class BlockView(Enum):
    """What the tokens of a block see: the tokens before it, or those in a window, and tokens of the block."""

    WHOLE = auto()
    """All tokens before the block, and all of it."""
    CAUSAL = auto()
    """The block's tokens before them alone."""
    AHEAD = auto()
    """All of the block, and a window before it."""


class BlockDrafter(ABC):
    """A model that drafts a whole block in one pass. T tokens, R rows of K drafts, D hidden."""

    groups: Sequence[int]
    """Numbers of the KV groups, among all of the step's, that it caches in."""
    views: Sequence[BlockView]
    """What the tokens of a block see in the layers of each of `groups`."""
    mask_id: int
    """The id in place of the drafts."""
    first_draft: int
    """The place in a block, 0 or 1, of the hidden state that gives the first draft."""
    block_cost: float
    """Time of one `predict` and `sample`, as a fraction of a step without drafts."""
    draft_cost: float
    """Time that comes to it with each draft of a row."""

    @abstractmethod
    def follow(self, computed: Computed) -> None:
        """Cache what the tokens of a step are to blocks after them."""

    @abstractmethod
    def predict(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Hidden states [T, D] of the tokens of blocks."""

    @abstractmethod
    def sample(
        self,
        hidden_RKD: torch.Tensor,
        last_ids_R: torch.Tensor,
        settings: SamplingBatch,
        positions_RK: torch.Tensor,
    ) -> torch.Tensor:
        """Drafts of the target's vocabulary after the last ids, int64 [R, K], sampled at these positions.

        `settings` are those of the R rows.
        """


def relative_cost(draft: Sequence[nn.Module], model: Sequence[nn.Module]) -> float:
    """The time of a pass of `draft` as a fraction of one of `model`, by the weights that they read."""
    return _bytes_read(draft) / max(_bytes_read(model), 1)


def _bytes_read(modules: Sequence[nn.Module]) -> int:
    layers = (layer for module in modules for layer in module.modules())
    tensors = {
        id(tensor): tensor
        for layer in layers
        if isinstance(layer, WeightedLayer) and not isinstance(layer, VocabEmbedding)
        for tensor in layer.held_tensors()
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class ModelMethod(Method):
    """A method that runs a model, whose KV groups are among those of the target."""

    def __init__(self, make: Callable[[BatchLimits, Sequence[GroupRows], torch.device], Proposer]):
        """`make` makes the proposer, from the tables of all KV groups."""
        self._make = make

    def kv_specs(self, specs: Sequence[KVSpec]) -> list[KVSpec]:
        return list(specs)

    def proposer(
        self,
        limits: BatchLimits,
        tables: Sequence[GroupRows],
        num_blocks: Sequence[int],
        device: torch.device,
    ) -> Proposer:
        return self._make(limits, tables, device)


@dataclass(frozen=True, slots=True)
class _Start:
    """What drafting starts from: the hidden state before each row's first prediction."""

    context: ForwardContext
    hidden_RD: torch.Tensor
    settings: SamplingBatch

    def select(self, indices: torch.Tensor) -> "_Start":
        """That of some rows; waits for the device."""
        if len(indices) == len(self.hidden_RD):
            return self
        return _Start(self.context, self.hidden_RD.index_select(0, indices), self.settings.select(indices))


class ModelProposer(Proposer):
    """The proposer of models that predict one token after the other."""

    runs_model = True

    def __init__(
        self,
        drafter: Drafter,
        limits: BatchLimits,
        tables: Sequence[GroupRows],
        device: torch.device,
        exact: bool | None = None,
        passes: DraftPasses | None = None,
    ):
        """`tables` of all KV groups.

        `exact`: whether the host reads the rows, and computes no padding; None: as the device requires. With
        `passes` each prediction has the rows that the ranks have agreed on.
        """
        self.passes = passes
        self.reads_next_ids = drafter.reads_pairs
        self.cost = drafter.cost
        self._drafter = drafter
        self._limits = limits
        self._tables = {group: tables[group] for group in drafter.groups}
        self._device_tables = {group: table.device_table(device) for group, table in self._tables.items()}
        self._exact = device.type == "cpu" if exact is None else exact
        self._start: _Start | None = None
        self._empty = {group: tables[group].empty_context(device, 0) for group in drafter.groups}
        self._followed: tuple[ForwardContext, torch.Tensor] | None = None

    def observe(self, computed: Computed, sampled: Sampled | None) -> None:
        hidden_TD = self._drafter.follow(computed, _next_ids(computed, sampled))
        if self.passes is not None:
            self._followed = computed.context, hidden_TD
        self._start = None
        if sampled is not None:
            hidden_RD = hidden_TD.index_select(0, _last_tokens(sampled))
            self._start = _Start(computed.context, hidden_RD, sampled.settings)

    def join_passes(self) -> None:
        assert self.passes is not None
        for _ in range(self.passes.num_drafts - self._drafter.reads_pairs):
            self._predict_padding()

    def propose(
        self,
        rows_R: torch.Tensor,
        state: RowState,
        max_positions: int,
        allowed_R: torch.Tensor | None = None,
    ) -> None:
        assert self._start is not None, "observe comes first"
        drafter = self._drafter
        start = self._start
        self._start = None
        room_R = rooms(rows_R, state)
        if allowed_R is not None:
            room_R = torch.minimum(room_R, allowed_R)
            if self.passes is None:
                drafting = allowed_R.nonzero()[:, 0]
                room_R = room_R[drafting]
                rows_R = rows_R[drafting]
                start = start.select(drafting)
        last_R = state.positions_N.index_select(0, rows_R)
        ids_R = state.ids_N.index_select(0, rows_R)
        hidden_RD = start.hidden_RD
        most = self._limits.num_drafts
        if self.passes is not None:
            most = self.passes.num_drafts
        elif self._exact:
            most = min(max(int(room_R.max()), 0), most)
        drafts_RK = ids_R.new_full((len(rows_R), self._limits.num_drafts), NO_DRAFT)
        for number in range(most):
            # A model of pairs has computed the pair of the last id; each later pair starts one token earlier.
            ahead = number - drafter.reads_pairs
            if ahead >= 0:
                at = _Tokens(rows_R, ids_R, last_R + ahead, room_R > number, ahead == 0)
                hidden_RD = self._predict(at, hidden_RD, start.context, state, max_positions + ahead)
            ids_R = drafter.sample(hidden_RD, start.settings, (last_R + number + 1).clamp(min=0))
            drafts_RK[:, number] = ids_R.masked_fill(room_R <= number, NO_DRAFT)
        state.drafts_NK.index_copy_(0, rows_R, drafts_RK)

    def _predict(
        self,
        tokens: "_Tokens",
        hidden_RD: torch.Tensor,
        step: ForwardContext,
        state: RowState,
        max_context: int,
    ) -> torch.Tensor:
        """The hidden states after one token of each row, [R, D]; of rows that need none, any.

        No context is longer than `max_context`.
        """
        if not self._exact:
            positions_R, context = self._context(tokens, step, state, max_context)
            positions_R = self._rope(positions_R, tokens)
            return self._compute(tokens.ids_R, hidden_RD, positions_R, context)
        needed = tokens.needed_R.nonzero()[:, 0]  # no padding is computed
        if not len(needed):
            if self.passes is not None:
                self._predict_padding()
            return hidden_RD
        tokens = tokens.select(needed)
        positions_R, context = self._context(tokens, step, state, max_context)
        positions_R = self._rope(positions_R, tokens)
        found_RD = self._compute(tokens.ids_R, hidden_RD.index_select(0, needed), positions_R, context)
        return hidden_RD.index_copy(0, needed, found_RD)

    def _rope(self, positions_R: torch.Tensor, tokens: "_Tokens") -> torch.Tensor:
        """The positions of RoPE, which images before the tokens change."""
        return positions_R if self.images is None else self.images.positions(positions_R, tokens.rows_R)

    def _predict_padding(self) -> None:
        """Take part in a prediction of other ranks with rows of padding alone."""
        assert self._followed is not None, "observe comes first"
        context, hidden_TD = self._followed
        groups = list(context.groups)
        for number, group in self._empty.items():
            groups[number] = group
        none = torch.zeros(0, dtype=torch.int64, device=hidden_TD.device)
        self._compute(none, hidden_TD[:0], none, replace(context, groups=groups, splitter=None))

    def _compute(
        self, ids_R: torch.Tensor, hidden_RD: torch.Tensor, positions_R: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """`predict`; where ranks agree on the number of rows, with padding up to it."""
        if self.passes is None:
            return self._drafter.predict(ids_R, hidden_RD, positions_R, context)
        self.passes.begin()
        rows = len(ids_R)
        most = self.passes.num_rows
        groups = list(context.groups)
        for number in self._tables:
            (groups[number],) = pad_groups([groups[number]], most, most)
        more = most - rows
        found_RD = self._drafter.predict(
            functional.pad(ids_R, (0, more)),
            functional.pad(hidden_RD, (0, 0, 0, more)),
            functional.pad(positions_R, (0, more)),
            replace(context, groups=groups),
        )
        return found_RD[:rows]

    def _context(
        self, tokens: "_Tokens", step: ForwardContext, state: RowState, max_context: int
    ) -> tuple[torch.Tensor, ForwardContext]:
        """Positions and context of one token of each row; a row that needs none is padding."""
        rows_R = tokens.rows_R
        block_size = self._limits.block_size
        longest = min(max_context, self._limits.max_context)
        rows = RowState(
            tokens.ids_R,
            tokens.positions_R.masked_fill(~tokens.needed_R, -1),
            state.limits_N.index_select(0, rows_R),
            tokens.ids_R.new_zeros(len(rows_R), 1),  # no draft is read
        )
        all_R = torch.arange(len(rows_R), device=rows_R.device)
        groups = list(step.groups)
        positions_R = tokens.positions_R
        for group, table in self._tables.items():
            of_step = groups[group]
            own_RW = self._device_tables[group].index_select(0, rows_R)
            if isinstance(table, StateSlots):
                groups[group] = self._states(tokens, table, own_RW)
                continue
            assert isinstance(of_step, GroupContext), "other groups have blocks"
            inputs = draft_inputs(all_R, rows, own_RW, block_size, 0)
            positions_R = inputs.positions_T
            table_RW = inputs.table_RW[:, : -(-longest // block_size)].contiguous()
            split_tokens = of_step.plan.split_tokens
            plan = one_token_plan(inputs.contexts_R, table_RW, longest, split_tokens, self._exact)
            groups[group] = GroupContext(inputs.slots_T, plan)
        return positions_R, replace(step, groups=groups, splitter=None)

    def _states(self, tokens: "_Tokens", table: StateSlots, slots_R: torch.Tensor) -> StatePlan:
        assert table.accepted_N is not None, "it is tracked with drafts"
        return predicting_states(
            slots_R.masked_fill(~tokens.needed_R, NO_SLOT),
            table.accepted_N.index_select(0, tokens.rows_R),
            table.places,
            tokens.is_first,
            self._exact,
        )


@dataclass(frozen=True, slots=True)
class _Tokens:
    """One token of each of R rows."""

    rows_R: torch.Tensor
    ids_R: torch.Tensor
    positions_R: torch.Tensor
    needed_R: torch.Tensor
    """bool: whether a draft follows it."""
    is_first: bool
    """Whether they are the first ones after those of the step."""

    def select(self, indices: torch.Tensor) -> "_Tokens":
        return _Tokens(
            self.rows_R.index_select(0, indices),
            self.ids_R.index_select(0, indices),
            self.positions_R.index_select(0, indices),
            self.needed_R.index_select(0, indices),
            self.is_first,
        )


def _next_ids(computed: Computed, sampled: Sampled | None) -> torch.Tensor:
    """The id after each of the T computed tokens, int64; 0 for padding."""
    num_tokens = len(computed.positions_T)
    next_ids = computed.positions_T.new_zeros(num_tokens + 1)
    if computed.next_ids_T is not None:
        next_ids[: len(computed.next_ids_T)].copy_(computed.next_ids_T)
    if sampled is not None:
        # A row at its limit has sampled after a token of another row; that is written after the end.
        first_S = sampled.drafts.first_positions_R.index_select(0, sampled.drafts.indices_S)
        where_S = sampled.tokens_S.masked_fill(first_S < 0, num_tokens)
        next_ids.index_copy_(0, where_S, sampled.ids_S)
    return next_ids[:num_tokens]


def _last_tokens(sampled: Sampled) -> torch.Tensor:
    """The computed token before each row's last sampled id, int64 [R]."""
    tokens_RJ = sampled.drafts.by_row(sampled.tokens_S)
    return tokens_RJ.gather(1, sampled.counts_R[:, None] - 1)[:, 0]


def rooms(rows_R: torch.Tensor, state: RowState) -> torch.Tensor:
    """How many drafts each row may have before its limit, int64 [R]."""
    last_R = state.positions_N.index_select(0, rows_R)
    # The last token that a row may sample is no draft: nothing is computed after it.
    return (state.limits_N.index_select(0, rows_R) - 2 - last_R).masked_fill(last_R < 0, 0)


def one_token_plan(
    contexts_R: torch.Tensor, table_RW: torch.Tensor, longest: int, split_tokens: int, on_host: bool
) -> AttentionPlan:
    """The attention of one token of each row, with no context longer than `longest`.

    `on_host`: whether the rows are on the host, where attention may read them.
    """
    rows = len(contexts_R)
    device = contexts_R.device
    if on_host:
        ones = np.ones(rows, np.int32)
        return plan_attention(ones, contexts_R.numpy(), table_RW.numpy(), device, split_tokens)
    starts_R1 = torch.arange(rows + 1, dtype=torch.int32, device=device)
    return AttentionPlan(
        table_RW,
        contexts_R,
        starts_R1,
        num_tokens=rows,
        min_query_len=1,
        max_query_len=1,
        max_context_len=longest,
        split_tokens=split_tokens,
    )
