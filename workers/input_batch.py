"""The batch that stays: what every row holds between steps, and the arrays of one step.

A `ScheduledBatch` names only what changed; everything else is kept here, in numpy on the host
and, for the last drawn ids, on the device. Work over tokens is vectorised; Python loops run over
changed rows only. Knows nothing of the model beyond its KV groups, and nothing of sampling.

T tokens of a step, R rows that draw, P tokens of prompts whose next tokens are scored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from atom.messages.worker import NewRow, ScheduledBatch
from atom_ops import StatePlan, to_device
from workers.block_table import BatchLimits
from workers.group_rows import GroupRows, Rows, StepRows
from workers.layers.context import GroupContext

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows of one step that draw a token."""

    rows: Rows
    """On the host; the same array object while the same rows decode on."""
    rows_R: torch.Tensor
    tokens_R: torch.Tensor
    """Index, among the step's tokens, of the token that each draw follows."""
    positions: Rows
    """Index that each drawn token will have in its sequence, on the host."""
    positions_R: torch.Tensor


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens of one row whose next tokens are prompt tokens too."""

    row: int
    start: int
    """Position of the first of the next tokens."""
    count: int


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """The tokens of one step at which the prompt's next token gets its log probability.

    Pieces one after another, P tokens in all.
    """

    pieces: list[PromptChunk]
    tokens_P: torch.Tensor
    """Index among the step's tokens."""
    next_ids_P: torch.Tensor
    top: int
    """The most that one of the rows asks for."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a forward pass and the sampler need for one step, on the device."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    groups: list[GroupContext | StatePlan]
    draw: SamplingRows | None
    scored: PromptLogprobRows | None = None


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Rows that all decode, ready to do so again as long as nobody joins or leaves."""

    names: list[int]
    rows: Rows
    """As an array: the same object while the same rows decode on."""
    rows_R: torch.Tensor
    tokens_R: torch.Tensor
    """0 … R - 1."""


class DeviceRows:
    """What every row drew last, on the device: the next step's inputs never leave it."""

    def __init__(self, limits: BatchLimits, device: torch.device):
        rows = limits.max_rows + 1
        self.ids_N = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions_N = torch.full((rows,), -1, dtype=torch.int64, device=device)
        """Of the ids, in their sequences; -1 for padding."""

    def keep(self, rows_R: torch.Tensor, ids_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        """Remember the drawn ids: they are the rows' next inputs."""
        self.ids_N.index_copy_(0, rows_R, ids_R)
        self.positions_N.index_copy_(0, rows_R, positions_R)


class InputBatch:
    """Turns each `ScheduledBatch` into the inputs of one step: first `take`, then `step`."""

    def __init__(
        self, limits: BatchLimits, tables: Sequence[GroupRows], device: torch.device, split_tokens: int = 0
    ):
        """`tables` are of the KV groups, empty; `split_tokens` goes to every AttentionPlan."""
        self.limits = limits
        self.device_rows = DeviceRows(limits, device)
        self.tables = list(tables)
        self._device = device
        self.split_tokens = split_tokens
        self._known = np.zeros(limits.max_rows, np.int64)
        self._computed = np.zeros(limits.max_rows, np.int64)
        self._scored_until = np.zeros(limits.max_rows, np.int64)
        self._scored_top = np.zeros(limits.max_rows, np.int64)
        self._decode_batch: DecodeBatch | None = None

    def take(self, batch: ScheduledBatch) -> None:
        """Take over what changed: new rows and new blocks.

        Raises ValueError or IndexError for a batch that breaks the contract of its message.
        """
        for new in batch.new_rows:
            self._admit(new)
        for more in batch.more_blocks:
            self._append_blocks(more.row, more.block_ids)

    def lengths(self, batch: ScheduledBatch) -> list[tuple[int, int]]:
        """Tokens of each of the batch's rows, before it is taken: (computed, known)."""
        new = {row.row: (row.computed, row.num_known) for row in batch.new_rows}
        return [new.get(row) or (int(self._computed[row]), int(self._known[row])) for row in batch.rows]

    def decode_batch(self, batch: ScheduledBatch) -> DecodeBatch | None:
        """The batch's rows, if each of them decodes."""
        if batch.counts:
            return None
        if self._decode_batch and not batch.new_rows and batch.rows == self._decode_batch.names:
            return self._decode_batch
        rows = np.array(batch.rows, np.int64)
        if (self._computed[rows] < self._known[rows]).any():
            return None
        rows_R, tokens_R = self._upload(rows, np.arange(len(rows)))
        self._decode_batch = DecodeBatch(batch.rows, rows, rows_R, tokens_R)
        return self._decode_batch

    def step(self, batch: ScheduledBatch) -> StepInputs:
        """The inputs of a step whose changes were taken; the rows' counts move on.

        Raises ValueError for more tokens than a row has.
        """
        decode_batch = self.decode_batch(batch)
        return self._assemble(batch) if decode_batch is None else self._decode(decode_batch)

    def advance(self, decode_batch: DecodeBatch) -> Rows:
        """The rows' counts move on by one token each.

        For a step whose inputs the device makes by itself. Returns where the tokens that it draws
        will stand.
        """
        drawn_positions = self._computed[decode_batch.rows] + 1
        self._computed[decode_batch.rows] = drawn_positions
        return drawn_positions

    def computed_tokens(self) -> Rows:
        """Computed tokens of every row of the persistent batch; a copy."""
        return self._computed.copy()

    def decodes(self, rows: Rows, computed: Rows) -> NDArray[np.bool_]:
        """Which of `rows` decode, if these are the `computed_tokens` of every row."""
        mask: NDArray[np.bool_] = computed[rows] >= self._known[rows]
        return mask

    def set_computed(self, rows: Rows, computed: Rows) -> None:
        """Set the computed tokens of `rows`, after a failed step."""
        self._computed[rows] = computed
        self._decode_batch = None

    def keep(self, draw: SamplingRows, ids_R: torch.Tensor) -> None:
        """Remember the drawn ids: they are the rows' next inputs."""
        self.device_rows.keep(draw.rows_R, ids_R, draw.positions_R)

    def _admit(self, new: NewRow) -> None:
        if not 0 <= new.computed < new.num_known:
            raise ValueError(
                f"row {new.row}: {new.computed} of {new.num_known} known tokens are computed; "
                "at least one must be left"
            )
        self._known[new.row] = new.num_known
        self._computed[new.row] = new.computed
        # The prompt's last token predicts no other one of the prompt.
        self._scored_until[new.row] = new.prompt_length - 1 if new.prompt_logprobs >= 0 else 0
        self._scored_top[new.row] = new.prompt_logprobs
        for table in self.tables:
            table.clear(new.row)
        self._append_blocks(new.row, new.block_ids)

    def _append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        for table, blocks in zip(self.tables, block_ids, strict=True):
            table.append(row, blocks)

    def _decode(self, decode_batch: DecodeBatch) -> StepInputs:
        """One more token for the same rows, all of them past their known tokens."""
        context_lens = self.advance(decode_batch)
        positions = context_lens - 1
        columns = [table.token_columns(decode_batch.rows, positions) for table in self.tables]
        positions_T, *columns_T = self._upload(positions, *chain(*columns))
        draw = SamplingRows(
            decode_batch.rows, decode_batch.rows_R, decode_batch.tokens_R, context_lens, positions_T + 1
        )
        step = StepRows(
            decode_batch.rows, np.ones_like(positions), context_lens, self._device, self.split_tokens
        )
        groups = self._contexts(columns, columns_T, step)
        ids_T = self.device_rows.ids_N.index_select(0, decode_batch.rows_R)
        return StepInputs(ids_T, positions_T, groups, draw)

    def _assemble(self, batch: ScheduledBatch) -> StepInputs:
        """Any mixture of prompt pieces and decodes."""
        rows = np.array(batch.rows, np.int64)
        counts = np.array(batch.counts, np.int64) if batch.counts else np.ones(len(rows), np.int64)
        starts, known = self._computed[rows], self._known[rows]
        ends = starts + counts
        self._require_known(rows, ends, np.maximum(known, starts + 1))
        self._computed[rows] = ends

        token_rows = rows.repeat(counts)
        past_tokens = counts.cumsum() - counts
        positions = np.arange(len(token_rows)) + (starts - past_tokens).repeat(counts)
        decodes = starts >= known
        ids = _ids_to_compute(batch.token_ids, counts, decodes)
        columns = [table.token_columns(token_rows, positions) for table in self.tables]
        ids_T, positions_T, *columns_T = self._upload(ids, positions, *chain(*columns))

        if decodes.any():
            where_T, rows_T = self._upload(past_tokens[decodes], rows[decodes])
            ids_T.index_copy_(0, where_T, self.device_rows.ids_N.index_select(0, rows_T))
        draw = self._draw(rows, past_tokens + counts - 1, ends, ends >= known)
        self._decode_batch = None
        step = StepRows(rows, counts, ends, self._device, self.split_tokens)
        groups = self._contexts(columns, columns_T, step)
        until = self._scored_until[rows]
        next_ids = _next_ids(
            ids, past_tokens + counts - 1, batch.next_ids, (starts < known) & (ends <= until)
        )
        scored = self._scored(rows, starts, past_tokens, np.minimum(ends, until) - starts, next_ids)
        return StepInputs(ids_T, positions_T, groups, draw, scored)

    def _draw(
        self, rows: Rows, last_tokens: Rows, positions: Rows, draws: NDArray[np.bool_]
    ) -> SamplingRows | None:
        if not draws.any():
            return None
        rows, positions = rows[draws], positions[draws]
        rows_R, tokens_R, positions_R = self._upload(rows, last_tokens[draws], positions)
        return SamplingRows(rows, rows_R, tokens_R, positions, positions_R)

    def _scored(
        self, rows: Rows, starts: Rows, first_tokens: Rows, counts: Rows, next_ids_T: Ids
    ) -> PromptLogprobRows | None:
        """`counts` may be negative: no prompt log probabilities are wanted at that row's tokens."""
        which = np.flatnonzero(counts > 0)
        if not len(which):
            return None
        rows, starts, counts = rows[which], starts[which], counts[which]
        inside = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        tokens = first_tokens[which].repeat(counts) + inside
        columns = (rows.tolist(), (starts + 1).tolist(), counts.tolist())
        pieces = [PromptChunk(*piece) for piece in zip(*columns, strict=True)]
        tokens_P, next_ids_P = self._upload(tokens, next_ids_T[tokens])
        return PromptLogprobRows(pieces, tokens_P, next_ids_P, int(self._scored_top[rows].max()))

    def _require_known(self, rows: Rows, ends: Rows, limits: Rows) -> None:
        wrong = np.flatnonzero(ends > limits)
        if len(wrong):
            row, end, limit = rows[wrong[0]], ends[wrong[0]], limits[wrong[0]]
            raise ValueError(f"row {row}: tokens up to {end} are scheduled, {limit} are known")

    def _contexts(
        self, columns: Sequence[Sequence[Rows]], columns_T: Sequence[torch.Tensor], step: StepRows
    ) -> list[GroupContext | StatePlan]:
        """Each group's, from its own `columns`, which are `columns_T` on the device, one after another."""
        uploaded = iter(columns_T)
        return [
            table.context([next(uploaded) for _ in own], step)
            for table, own in zip(self.tables, columns, strict=True)
        ]

    def _upload(self, *columns: NDArray[np.integer]) -> tuple[torch.Tensor, ...]:
        """Equally long integer columns as int64 tensors on the device, in one copy."""
        return to_device(np.stack(columns).astype(np.int64, copy=False), self._device).unbind()


def _ids_to_compute(packed: bytes, counts: Rows, decodes: NDArray[np.bool_]) -> Ids:
    """Ids of the step's tokens [T]; 0 for decodes, whose ids are on the device.

    Raises ValueError unless there is one for each known token.
    """
    known = np.frombuffer(packed, np.dtype("<i4"))
    if len(known) != counts[~decodes].sum():
        raise ValueError(f"{len(known)} token ids for {counts[~decodes].sum()} known tokens of the step")
    ids = np.zeros(counts.sum(), np.int32)
    ids[~decodes.repeat(counts)] = known
    return ids


def _next_ids(ids_T: Ids, last_tokens: Rows, packed: bytes, wanted: NDArray[np.bool_]) -> Ids:
    """The id behind each token [T], as far as its row's chunk goes, and behind the chunks of `wanted` rows.

    Raises ValueError unless there is one for each of these.
    """
    following = np.frombuffer(packed, np.dtype("<i4"))
    if len(following) != wanted.sum():
        raise ValueError(f"{len(following)} ids behind {wanted.sum()} chunks of prompts")
    next_ids_T = np.roll(ids_T, -1)
    next_ids_T[last_tokens[wanted]] = following
    return next_ids_T
