"""The persistent batch: the state of each row between steps, and the input tensors of one step.

A `ScheduledBatch` has only the changes and the ids to compute. The rest is kept here: in numpy on
the host and, for the last sampled ids, on the device. Work over tokens is vectorized; Python loops
run over changed rows only. Sampling settings are kept elsewhere (`workers.sampling.sampler`).

T tokens of a step, R sampling rows, P tokens with prompt log probabilities.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.messages.worker import NewRow, ScheduledBatch
from atom_ops import NO_DRAFT, StatePlan, draft_inputs, to_device
from workers.batch.block_table import BatchLimits
from workers.batch.group_rows import GroupRows, Rows, StepRows
from workers.batch.image_rows import ImageRows, StepTokens
from workers.batch.state_slots import StateSlots
from workers.batch.step_inputs import (
    AppliedBatch,
    PromptChunk,
    PromptLogprobRows,
    SamplingRows,
    StepInputs,
    UniformDecode,
)
from workers.layers.context import GroupContext
from workers.spec_decode.draft_rows import DraftRows, Draws, Verified
from workers.spec_decode.proposer import Proposer
from workers.spec_decode.speculation import Speculation

Ids = NDArray[np.int32]


class DeviceRows:
    """The id that each row sampled last, on the device: the input of its next decode."""

    def __init__(self, limits: BatchLimits, device: torch.device):
        rows = limits.max_rows + 1
        self.ids_N = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions_N = torch.full((rows,), -1, dtype=torch.int64, device=device)
        """Positions of these ids in their sequences; -1 for padding."""

    def store(self, rows_R: torch.Tensor, ids_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        """Store the sampled ids."""
        self.ids_N.index_copy_(0, rows_R, ids_R)
        self.positions_N.index_copy_(0, rows_R, positions_R)


class InputBatch:
    """Builds the inputs of one step from each `ScheduledBatch`: first `apply`, then `step`."""

    def __init__(
        self,
        limits: BatchLimits,
        tables: Sequence[GroupRows],
        device: torch.device,
        split_tokens: int = 0,
        proposer: Proposer | None = None,
        exact: bool | None = None,
        adaptive: bool = False,
        forced_length: float | None = None,
    ):
        """`tables` of the KV groups are empty; `split_tokens` is passed to every AttentionPlan.

        With a `proposer`, rows have drafts. `exact`, `adaptive`, `forced_length`: see `Speculation`; `exact`
        None: as the device requires.
        """
        self.limits = limits
        self.device_rows = DeviceRows(limits, device)
        self.speculation: Speculation | None = None
        if proposer is not None:
            last_N = self.device_rows.ids_N, self.device_rows.positions_N
            is_exact = device.type == "cpu" if exact is None else exact
            self.speculation = Speculation(proposer, limits, last_N, is_exact, adaptive, forced_length)
            for table in tables:
                table.device_table(device)
                if isinstance(table, StateSlots):
                    table.accepted_N = self.speculation.track_accepted()
        self.tables = list(tables)
        self._next_ids = proposer is not None and proposer.reads_next_ids
        self._device = device
        self.split_tokens = split_tokens
        self._num_prefill_tokens = np.zeros(limits.max_rows, np.int64)
        """Tokens that had ids when the row was admitted; once all of them are computed, the row decodes."""
        self._num_computed_tokens = np.zeros(limits.max_rows, np.int64)
        """Tokens of each row in launched steps. With drafts in flight an upper bound, until `settle`."""
        self._prompt_logprobs_until = np.zeros(limits.max_rows, np.int64)
        self._prompt_logprobs_top = np.zeros(limits.max_rows, np.int64)
        self._uniform: UniformDecode | None = None
        self.images: ImageRows | None = None
        """Set for a model with a vision tower, before the first batch."""

    def apply(self, batch: ScheduledBatch) -> AppliedBatch:
        """Apply the batch's new rows and new blocks.

        Raises ValueError or IndexError for a batch that violates the contract of its message.
        """
        for new in batch.new_rows:
            self._admit(new)
        for more in batch.more_blocks:
            self._append_blocks(more.row, more.block_ids)
        if self.speculation is not None:
            self.speculation.add_rows(batch.new_rows)
            for table in self.tables:
                table.update_device_table()
        applied = self._applied(batch)
        if self.speculation is not None:
            self.speculation.begin_step(applied.decodes)
        return applied

    def lengths(self, batch: ScheduledBatch) -> list[tuple[int, int]]:
        """(computed tokens, tokens to prefill) of each row of a batch that is not applied yet."""
        new = {row.row: (row.computed, row.num_known) for row in batch.new_rows}
        return [
            new.get(row) or (int(self._num_computed_tokens[row]), int(self._num_prefill_tokens[row]))
            for row in batch.rows
        ]

    def num_step_tokens(self, applied: AppliedBatch) -> int:
        """Tokens of the step; at least 1, which may be padding."""
        if applied.is_uniform:
            return len(applied.rows) * (1 + applied.num_drafts)
        counts = applied.counts
        if self._is_exact:
            assert self.speculation is not None
            counts = counts.copy()
            decodes = applied.decodes
            counts[decodes] = self.speculation.exact_work(applied.rows[decodes], applied.num_drafts)[1]
        return max(int(counts.sum()), 1)

    @property
    def has_states(self) -> bool:
        """Whether there are recurrent layers."""
        return any(isinstance(table, StateSlots) for table in self.tables)

    def needs_eager(self, applied: AppliedBatch) -> bool:
        """Whether the step must be eager, since it computes tokens of a prompt with images."""
        return self.images is not None and self.images.prefills(applied.rows, applied.decodes)

    def plan_passes(self, applied: AppliedBatch) -> None:
        """State the drafts that the rows of this batch may have after its step."""
        if self.speculation is None:
            return
        ends = applied.starts + applied.counts
        samples = applied.decodes | (ends >= self._num_prefill_tokens[applied.rows])
        pauses = applied.num_drafts == 0 and bool(applied.decodes.any()) and not self._is_exact
        self.speculation.plan_passes(applied.rows[samples], pauses)

    def decoding(self, applied: AppliedBatch) -> AppliedBatch:
        """The decoding rows of a batch alone."""
        decodes = applied.decodes
        return AppliedBatch(
            applied.rows[decodes],
            applied.starts[decodes],
            applied.counts[decodes],
            decodes[decodes],
            applied.num_drafts,
            not self._is_exact,
        )

    def uniform_decode(self, applied: AppliedBatch) -> UniformDecode:
        """The rows of a uniform batch on the device, which are uploaded only if they have changed."""
        last = self._uniform
        if last is not None and last.rows is applied.rows and last.num_drafts == applied.num_drafts:
            return last
        rows = applied.rows
        token_rows = rows.repeat(1 + applied.num_drafts)
        (rows_R,) = self._upload(rows)
        (tokens_S,) = self._upload(np.arange(len(token_rows)))
        self._uniform = UniformDecode(
            rows.tolist(),
            applied.num_drafts,
            rows,
            applied.counts,
            applied.decodes,
            rows_R,
            token_rows,
            tokens_S,
        )
        return self._uniform

    def step(self, applied: AppliedBatch) -> StepInputs:
        """The inputs of a batch; its tokens count as computed from now on.

        Raises ValueError for more tokens than a row has, and for a wrong number of ids.
        """
        if self.speculation is None and applied.is_uniform:
            return self._decode(applied)
        step = self._assemble(applied)
        if self.speculation is not None:
            self.speculation.add_tokens(step.ids_T, step.groups)
        return step

    def empty_step(self) -> StepInputs:
        """A step of no tokens and no rows, to pad."""
        none_T = torch.empty(0, dtype=torch.int64, device=self._device)
        groups = [table.empty_context(self._device, self.split_tokens) for table in self.tables]
        return StepInputs(none_T, none_T, groups, None)

    def advance(self, applied: AppliedBatch) -> Rows:
        """Count the tokens of each row as computed; returns the positions of the sampled tokens.

        For a step whose inputs are computed on the device. With drafts, positions are upper bounds.
        """
        width = 1 + applied.num_drafts
        positions = applied.starts + 1
        self._num_computed_tokens[applied.rows] = applied.starts + width
        if width == 1:
            return positions
        return (positions[:, None] + np.arange(width)).ravel()

    def set_computed(self, rows: Rows, computed: Rows) -> None:
        """Set the computed tokens of `rows`, after a failed step."""
        self._num_computed_tokens[rows] = computed
        self._uniform = None

    def store_sampled(self, sampling: SamplingRows, draws: Draws) -> Verified | None:
        """Store the sampled ids: the inputs of the rows' next step. Returns what was verified."""
        if self.speculation is not None and sampling.drafts is not None:
            return self.speculation.verify(sampling.drafts, draws)
        self.device_rows.store(sampling.rows_R, draws.ids_S, sampling.positions_R)
        return None

    def settle(self, drafts: DraftRows) -> Callable[[Rows], None]:
        """A function that takes the number of tokens by which each row advanced, once it is known.

        Steps launched since counted every draft as accepted. A row that has a new request by then is left
        as it is: its number of admissions differs.
        """
        assert self.speculation is not None, "only steps with speculation have drafts"
        speculation = self.speculation
        most = 1 + drafts.drafts_RK.shape[1]
        admissions = speculation.admissions(drafts.rows)

        def settle(counts: Rows) -> None:
            same = (speculation.admissions(drafts.rows) == admissions) & drafts.decoded
            self._num_computed_tokens[drafts.rows[same]] -= most - counts[same]

        return settle

    @property
    def _is_exact(self) -> bool:
        """Whether the host reads how many drafts each row has, so that decodes differ in length."""
        return self.speculation is not None and self.speculation.exact

    def _applied(self, batch: ScheduledBatch) -> AppliedBatch:
        last = self._uniform
        is_same = last is not None and not batch.new_rows and not batch.counts and batch.rows == last.row_list
        rows = last.rows if is_same and last is not None else np.array(batch.rows, np.int64)
        num_drafts = batch.num_drafts
        if not batch.counts and self._is_exact:
            assert self.speculation is not None
            num_drafts = num_drafts if self.speculation.any_drafts(rows) else 0
        if is_same and last is not None and num_drafts == last.num_drafts:
            starts = self._num_computed_tokens[last.rows]
            return AppliedBatch(last.rows, starts, last.counts, last.decodes, num_drafts, True)
        starts = self._num_computed_tokens[rows]
        decodes = starts >= self._num_prefill_tokens[rows]
        if batch.counts:
            counts = np.array(batch.counts, np.int64)
        else:
            counts = np.full(len(rows), 1 + num_drafts, np.int64)
        is_uniform = not batch.counts and bool(decodes.all()) and not (self._is_exact and num_drafts)
        return AppliedBatch(
            rows, starts, counts, decodes, num_drafts, is_uniform, batch.token_ids, batch.next_ids
        )

    def _admit(self, new: NewRow) -> None:
        if not 0 <= new.computed < new.num_known:
            raise ValueError(
                f"row {new.row}: {new.computed} of {new.num_known} known tokens are computed; "
                "at least one must be left"
            )
        self._num_prefill_tokens[new.row] = new.num_known
        self._num_computed_tokens[new.row] = new.computed
        # No prompt token follows the last one.
        self._prompt_logprobs_until[new.row] = new.prompt_length - 1 if new.prompt_logprobs >= 0 else 0
        self._prompt_logprobs_top[new.row] = new.prompt_logprobs
        for table in self.tables:
            table.clear(new.row)
        self._append_blocks(new.row, new.block_ids)
        if self.images is not None:
            self.images.admit(new)

    def _append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        for table, blocks in zip(self.tables, block_ids, strict=True):
            table.append(row, blocks)

    def _decode(self, applied: AppliedBatch) -> StepInputs:
        """The next token of rows that all decode."""
        uniform = self.uniform_decode(applied)
        context_lens = self.advance(applied)
        positions = applied.starts
        columns = [table.token_columns(applied.rows, positions) for table in self.tables]
        positions_T, *columns_T = self._upload(positions, *chain(*columns))
        sampling = SamplingRows(
            uniform.token_rows, uniform.rows_R, uniform.tokens_S, context_lens, positions_T + 1
        )
        step = StepRows(
            applied.rows, applied.counts, context_lens, applied.decodes, self._device, self.split_tokens
        )
        groups = self._contexts(columns, columns_T, step)
        ids_T = self.device_rows.ids_N.index_select(0, uniform.rows_R)
        rope_T = None
        if self.images is not None and self.images.any(applied.rows):
            rope_T = self.images.positions(positions_T, uniform.rows_R)
        return StepInputs(ids_T, positions_T, groups, sampling, rope=rope_T)

    def _assemble(self, applied: AppliedBatch) -> StepInputs:
        """Any mixture of prompt chunks and decodes."""
        rows = applied.rows
        decodes = applied.decodes
        num_drafts = applied.num_drafts
        known = self._num_prefill_tokens[rows]
        computed = applied.starts + applied.counts
        self._require_known(rows, computed, np.where(decodes, applied.starts + 1 + num_drafts, known))
        self._num_computed_tokens[rows] = computed
        starts, counts, draft_ids = self._draft_work(applied)
        ends = starts + counts

        token_rows = rows.repeat(counts)
        past_tokens = counts.cumsum() - counts
        positions = np.arange(len(token_rows)) + (starts - past_tokens).repeat(counts)
        ids = _ids_to_compute(applied.token_ids, counts, decodes, draft_ids)
        last_tokens = past_tokens + counts - 1
        until = self._prompt_logprobs_until[rows]
        continues = ends < known if self._next_ids else (starts < known) & (ends <= until)
        next_ids = _next_ids(ids, last_tokens, applied.next_ids, continues & ~decodes)
        columns = [table.token_columns(token_rows, positions) for table in self.tables]
        shifted = [next_ids] if self._next_ids else []
        ids_T, positions_T, *columns_T = self._upload(ids, positions, *chain(*columns), *shifted)
        next_ids_T = columns_T.pop() if shifted else None
        self._uniform = None  # rows of the last decode may have new requests, which prefill
        tokens = StepTokens(rows, starts, counts, past_tokens)
        ahead = None if self.images is None else self.images.ahead(tokens)
        step = StepRows(rows, counts, ends, decodes, self._device, self.split_tokens, ahead)
        groups = self._contexts(columns, columns_T, step)
        work = _Work(rows, starts, counts, past_tokens, decodes, num_drafts)
        if draft_ids is None and decodes.any():
            self._add_decodes(work, ids_T, positions_T, groups)

        if self.speculation is None:
            sampling = self._sampling(rows, last_tokens, ends, ends >= known)
        else:
            sampling = self._draft_sampling(work, decodes | (ends >= known))
        counts_P = np.where(decodes, 0, np.minimum(ends, until) - starts)
        prompt_logprobs = self._prompt_logprobs(rows, starts, past_tokens, counts_P, next_ids)
        inputs = StepInputs(ids_T, positions_T, groups, sampling, prompt_logprobs, next_ids_T)
        if self.images is not None:
            changed = self.images.inputs(tokens, positions_T)
            if changed is not None:
                inputs = replace(
                    inputs,
                    rope=changed.positions,
                    images=changed.tokens,
                    next_images=changed.next_tokens,
                )
        return inputs

    def _draft_work(self, applied: AppliedBatch) -> tuple[Rows, Rows, Ids | None]:
        """First positions and numbers of tokens of each row, and the ids that decoding rows compute.

        Without exact counts the ids are None, and the positions of decoding rows are upper bounds.
        """
        speculation = self.speculation
        decodes = applied.decodes
        if speculation is None:
            return applied.starts, applied.counts, None
        if not speculation.exact:
            last_starts = np.minimum(applied.starts, speculation.last_starts(applied.rows))
            return np.where(decodes, last_starts, applied.starts), applied.counts, None
        starts = applied.starts.copy()
        counts = applied.counts.copy()
        starts[decodes], counts[decodes], ids = speculation.exact_work(
            applied.rows[decodes], applied.num_drafts
        )
        return starts, counts, ids

    def _add_decodes(
        self,
        work: "_Work",
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        groups: list[GroupContext | StatePlan],
    ) -> None:
        """Write what only the device knows of the decoding rows: ids and, with drafts, where they are."""
        rows = work.rows[work.decodes]
        first_tokens = work.past_tokens[work.decodes]
        if self.speculation is None:
            first_D, rows_D = self._upload(first_tokens, rows)
            ids_T.index_copy_(0, first_D, self.device_rows.ids_N.index_select(0, rows_D))
            return
        indices_D, rows_D = self._upload(np.flatnonzero(work.decodes), rows)
        tokens = first_tokens[:, None] + np.arange(1 + work.num_drafts)
        (tokens_T,) = self._upload(tokens.ravel())
        for number, (table, group) in enumerate(zip(self.tables, groups, strict=True)):
            if isinstance(group, StatePlan):
                continue  # its plan has the rows' states
            exact = draft_inputs(
                rows_D,
                self.speculation.state,
                table.device_table(self._device),
                self.limits.block_size,
                work.num_drafts,
            )
            plan = group.plan
            ids_T.index_copy_(0, tokens_T, exact.ids_T)
            positions_T.index_copy_(0, tokens_T, exact.positions_T)
            group.slots_T.index_copy_(0, tokens_T, exact.slots_T)
            plan.context_lens_R.index_copy_(0, indices_D, exact.contexts_R)
            plan.block_table_RW.index_copy_(0, indices_D, exact.table_RW[:, : plan.block_table_RW.shape[1]])
            host = plan.host and replace(plan.host, exact=False)
            groups[number] = replace(group, plan=replace(plan, host=host))

    def _draft_sampling(self, work: "_Work", samples: NDArray[np.bool_]) -> SamplingRows | None:
        """The sampled tokens of rows with drafts: one after each token of a decode, one after a prompt."""
        assert self.speculation is not None
        if not samples.any():
            return None
        rows = work.rows[samples]
        decodes = work.decodes[samples]
        counts = work.counts[samples]
        # A row at its limit computes no token. Its sample, of any token, is not used.
        at_limit = counts == 0
        width = 1 + work.num_drafts
        sampled = np.where(decodes, np.maximum(counts, 1), 1)
        row_indices = np.arange(len(rows)).repeat(sampled)
        num_before = np.arange(len(row_indices)) - (sampled.cumsum() - sampled).repeat(sampled)
        last_tokens = (work.past_tokens[samples] + counts - sampled)[row_indices] + num_before
        last_tokens[at_limit[row_indices]] = 0
        ends = work.starts[samples] + counts
        first = np.where(decodes, work.starts[samples] + 1, ends)
        first = np.where(at_limit, -1, first)
        positions = (first[row_indices] + num_before).clip(min=0)

        rows_R, first_R, decodes_R = self._upload(rows, first, decodes.astype(np.int64))
        tokens_S, places_S, indices_S, before_S = self._upload(
            last_tokens, row_indices * width + num_before, row_indices, num_before
        )
        state = self.speculation.state
        is_decode_R = decodes_R.bool()
        if not self.speculation.exact:
            last_R = state.positions_N[rows_R]
            limit_R = state.limits_N[rows_R]
            of_decode_R = (last_R + 1).masked_fill((last_R < 0) | (last_R >= limit_R - 1), -1)
            first_R = torch.where(is_decode_R, of_decode_R, first_R)
        drafts_RK = state.drafts_NK[rows_R, : work.num_drafts].masked_fill(~is_decode_R[:, None], NO_DRAFT)
        in_order = len(row_indices) == len(rows) * width
        drafts = DraftRows(
            rows, decodes, rows_R, first_R, drafts_RK, row_indices, num_before, None if in_order else places_S
        )
        positions_S = (first_R[indices_S] + before_S).clamp_(min=0)
        return SamplingRows(rows[row_indices], rows_R, tokens_S, positions, positions_S, drafts)

    def _sampling(
        self, rows: Rows, last_tokens: Rows, positions: Rows, samples: NDArray[np.bool_]
    ) -> SamplingRows | None:
        if not samples.any():
            return None
        rows = rows[samples]
        positions = positions[samples]
        rows_R, tokens_R, positions_R = self._upload(rows, last_tokens[samples], positions)
        return SamplingRows(rows, rows_R, tokens_R, positions, positions_R)

    def _prompt_logprobs(
        self, rows: Rows, starts: Rows, first_tokens: Rows, counts: Rows, next_ids_T: Ids
    ) -> PromptLogprobRows | None:
        """`counts` may be negative: no prompt log probabilities are wanted at that row's tokens."""
        which = np.flatnonzero(counts > 0)
        if not len(which):
            return None
        rows = rows[which]
        starts = starts[which]
        counts = counts[which]
        inside = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        tokens = first_tokens[which].repeat(counts) + inside
        chunks = list(map(PromptChunk, rows.tolist(), (starts + 1).tolist(), counts.tolist()))
        tokens_P, next_ids_P = self._upload(tokens, next_ids_T[tokens])
        return PromptLogprobRows(chunks, tokens_P, next_ids_P, int(self._prompt_logprobs_top[rows].max()))

    def _require_known(self, rows: Rows, ends: Rows, limits: Rows) -> None:
        wrong = np.flatnonzero(ends > limits)
        if len(wrong):
            row = rows[wrong[0]]
            end = ends[wrong[0]]
            limit = limits[wrong[0]]
            raise ValueError(f"row {row}: tokens up to {end} are scheduled, {limit} are known")

    def _contexts(
        self, columns: Sequence[Sequence[Rows]], columns_T: Sequence[torch.Tensor], step: StepRows
    ) -> list[GroupContext | StatePlan]:
        """The context of each group; `columns_T` are all `columns` on the device, one after another."""
        uploaded = iter(columns_T)
        return [
            table.context([next(uploaded) for _ in group_columns], step)
            for table, group_columns in zip(self.tables, columns, strict=True)
        ]

    def _upload(self, *columns: NDArray[np.integer]) -> tuple[torch.Tensor, ...]:
        """Equally long integer columns as int64 tensors on the device, in one copy."""
        return to_device(np.stack(columns).astype(np.int64, copy=False), self._device).unbind()


@dataclass(frozen=True, slots=True)
class _Work:
    """What each row of a step computes, on the host."""

    rows: Rows
    starts: Rows
    counts: Rows
    past_tokens: Rows
    """The step's tokens before the row's."""
    decodes: NDArray[np.bool_]
    num_drafts: int


def _ids_to_compute(
    packed: bytes, counts: Rows, decodes: NDArray[np.bool_], decode_ids: Ids | None = None
) -> Ids:
    """Ids of the step's tokens [T]; for decodes `decode_ids`, or 0 where they are on the device.

    Raises ValueError unless there is one for each known token.
    """
    known = np.frombuffer(packed, np.dtype("<i4"))
    if len(known) != counts[~decodes].sum():
        raise ValueError(f"{len(known)} token ids for {counts[~decodes].sum()} known tokens of the step")
    ids = np.zeros(counts.sum(), np.int32)
    of_decodes = decodes.repeat(counts)
    ids[~of_decodes] = known
    if decode_ids is not None:
        ids[of_decodes] = decode_ids
    return ids


def _next_ids(ids_T: Ids, last_tokens: Rows, packed: bytes, wanted: NDArray[np.bool_]) -> Ids:
    """The id after each token [T] within its row's chunk, and after the chunks of `wanted` rows.

    Raises ValueError unless `packed` has one id for each `wanted` row.
    """
    chunk_next_ids = np.frombuffer(packed, np.dtype("<i4"))
    if len(chunk_next_ids) != wanted.sum():
        raise ValueError(f"{len(chunk_next_ids)} next ids for {wanted.sum()} prompt chunks")
    next_ids_T = np.roll(ids_T, -1)
    next_ids_T[last_tokens[wanted]] = chunk_next_ids
    return next_ids_T
