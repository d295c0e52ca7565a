"""The batch that stays: what every row holds between steps, and the arrays of one step.

A `ScheduledBatch` names only what changed; everything else is kept here, in numpy on the host
and, for the last drawn ids, on the device. Work over tokens is vectorised; Python loops run over
changed rows only. Knows nothing of the model beyond its KV groups, and nothing of sampling.

T tokens of a step, R rows that draw, P tokens of prompts whose next tokens are scored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from atom.messages.worker import MoreBlocks, NewRow, ScheduledBatch
from atom_ops import plan_attention, to_device
from workers.layers.context import GroupContext

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Sizes that no step exceeds, and the units of the tables."""

    max_rows: int
    max_model_len: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Draw:
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
class PromptPiece:
    """Tokens of one row whose next tokens are prompt tokens too."""

    row: int
    start: int
    """Position of the first of the next tokens."""
    count: int


@dataclass(frozen=True, slots=True)
class Scored:
    """The tokens of one step at which the prompt's next token gets its log probability.

    Pieces one after another, P tokens in all.
    """

    pieces: list[PromptPiece]
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
    groups: list[GroupContext]
    draw: Draw | None
    scored: Scored | None = None


class BlockTable:
    """The blocks of every row in one KV group: position p lives in entry p // block_size."""

    def __init__(self, limits: BatchLimits):
        self._block_size = limits.block_size
        entries = -(-limits.max_model_len // limits.block_size)
        self._blocks = np.zeros((limits.max_rows, entries), np.int32)
        self._counts = np.zeros(limits.max_rows, np.int64)

    def clear(self, row: int) -> None:
        self._counts[row] = 0

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        start = self._counts[row]
        self._blocks[row, start : start + len(block_ids)] = block_ids
        self._counts[row] += len(block_ids)

    def rows(self, rows: Rows, context_lens: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tables of these rows, as wide as the longest context needs."""
        width = (int(context_lens.max()) - 1) // self._block_size + 1
        return self._blocks[:, :width].take(rows, axis=0)

    def slots(self, rows: Rows, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the token of each (row, position) is kept."""
        blocks = self._blocks[rows, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size


@dataclass(frozen=True, slots=True)
class _Cohort:
    """Rows that all decode, ready to do so again as long as nobody joins or leaves."""

    names: list[int]
    rows: Rows
    ones: NDArray[np.int64]
    rows_R: torch.Tensor
    tokens_R: torch.Tensor

    @classmethod
    def of(cls, names: list[int], draw: Draw) -> "_Cohort":
        ones = np.ones(len(names), np.int64)
        return cls(names, draw.rows, ones, draw.rows_R, draw.tokens_R)


class InputBatch:
    """Turns each `ScheduledBatch` into the inputs of one step."""

    def __init__(self, limits: BatchLimits, num_groups: int, device: torch.device):
        self._device = device
        self._token_ids = np.zeros((limits.max_rows, limits.max_model_len), np.int32)
        self._known = np.zeros(limits.max_rows, np.int64)
        self._computed = np.zeros(limits.max_rows, np.int64)
        self._scored_until = np.zeros(limits.max_rows, np.int64)
        self._scored_top = np.zeros(limits.max_rows, np.int64)
        self._tables = [BlockTable(limits) for _ in range(num_groups)]
        self._last_ids = torch.zeros(limits.max_rows, dtype=torch.int64, device=device)
        self._cohort: _Cohort | None = None

    def apply(self, batch: ScheduledBatch) -> StepInputs:
        """Take over what changed and make the step's inputs; the rows' counts move on.

        Raises ValueError or IndexError for a batch that breaks the contract of its message.
        """
        for new in batch.new_rows:
            self._admit(new)
        for more in batch.more_blocks:
            self._extend(more)
        cohort = self._cohort
        if cohort and not batch.counts and not batch.new_rows and batch.rows == cohort.names:
            return self._decode(cohort)
        return self._assemble(batch)

    def keep(self, draw: Draw, ids_R: torch.Tensor) -> None:
        """Remember the drawn ids: they are the rows' next inputs."""
        self._last_ids.index_copy_(0, draw.rows_R, ids_R)

    def _admit(self, new: NewRow) -> None:
        token_ids = np.frombuffer(new.token_ids, np.dtype("<i4"))
        if not 0 <= new.computed < len(token_ids):
            raise ValueError(
                f"row {new.row}: {new.computed} of {len(token_ids)} known tokens are computed; "
                "at least one must be left"
            )
        self._token_ids[new.row, : len(token_ids)] = token_ids
        self._known[new.row] = len(token_ids)
        self._computed[new.row] = new.computed
        # The prompt's last token predicts no other one of the prompt.
        self._scored_until[new.row] = new.prompt_length - 1 if new.prompt_logprobs >= 0 else 0
        self._scored_top[new.row] = new.prompt_logprobs
        for table in self._tables:
            table.clear(new.row)
        self._append_blocks(new.row, new.block_ids)

    def _extend(self, more: MoreBlocks) -> None:
        self._append_blocks(more.row, more.block_ids)

    def _append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        for table, blocks in zip(self._tables, block_ids, strict=True):
            table.append(row, blocks)

    def _decode(self, cohort: _Cohort) -> StepInputs:
        """One more token for the same rows, all of them past their known tokens."""
        positions = self._computed[cohort.rows]
        context_lens = positions + 1
        self._computed[cohort.rows] = context_lens
        slots = [table.slots(cohort.rows, positions) for table in self._tables]
        positions_T, *slots_T = self._upload(positions, *slots)
        draw = Draw(cohort.rows, cohort.rows_R, cohort.tokens_R, context_lens, positions_T + 1)
        groups = self._group_contexts(slots_T, cohort.rows, cohort.ones, context_lens)
        return StepInputs(self._last_ids.index_select(0, cohort.rows_R), positions_T, groups, draw)

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
        ids = self._token_ids[token_rows, positions]
        slots = [table.slots(token_rows, positions) for table in self._tables]
        ids_T, positions_T, *slots_T = self._upload(ids, positions, *slots)

        decodes = starts >= known
        if decodes.any():
            where_T, rows_T = self._upload(past_tokens[decodes], rows[decodes])
            ids_T.index_copy_(0, where_T, self._last_ids.index_select(0, rows_T))
        draw = self._draw(rows, past_tokens + counts - 1, ends, ends >= known)
        self._cohort = _Cohort.of(batch.rows, draw) if decodes.all() and draw else None
        groups = self._group_contexts(slots_T, rows, counts, ends)
        scored = self._scored(rows, starts, past_tokens, np.minimum(ends, self._scored_until[rows]) - starts)
        return StepInputs(ids_T, positions_T, groups, draw, scored)

    def _draw(self, rows: Rows, last_tokens: Rows, positions: Rows, draws: NDArray[np.bool_]) -> Draw | None:
        if not draws.any():
            return None
        rows, positions = rows[draws], positions[draws]
        rows_R, tokens_R, positions_R = self._upload(rows, last_tokens[draws], positions)
        return Draw(rows, rows_R, tokens_R, positions, positions_R)

    def _scored(self, rows: Rows, starts: Rows, first_tokens: Rows, counts: Rows) -> Scored | None:
        """`counts` may be negative: a row at whose tokens nothing is scored."""
        which = np.flatnonzero(counts > 0)
        if not len(which):
            return None
        rows, starts, counts = rows[which], starts[which], counts[which]
        inside = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        tokens = first_tokens[which].repeat(counts) + inside
        next_ids = self._token_ids[rows.repeat(counts), (starts + 1).repeat(counts) + inside]
        columns = (rows.tolist(), (starts + 1).tolist(), counts.tolist())
        pieces = [PromptPiece(*piece) for piece in zip(*columns, strict=True)]
        tokens_P, next_ids_P = self._upload(tokens, next_ids)
        return Scored(pieces, tokens_P, next_ids_P, int(self._scored_top[rows].max()))

    def _require_known(self, rows: Rows, ends: Rows, limits: Rows) -> None:
        wrong = np.flatnonzero(ends > limits)
        if len(wrong):
            row, end, limit = rows[wrong[0]], ends[wrong[0]], limits[wrong[0]]
            raise ValueError(f"row {row}: tokens up to {end} are scheduled, {limit} are known")

    def _group_contexts(
        self,
        slots_T: Sequence[torch.Tensor],
        rows: Rows,
        counts: NDArray[np.int64],
        context_lens: NDArray[np.int64],
    ) -> list[GroupContext]:
        query_lens, contexts = counts.astype(np.int32), context_lens.astype(np.int32)
        return [
            GroupContext(
                slots, plan_attention(query_lens, contexts, table.rows(rows, context_lens), self._device)
            )
            for slots, table in zip(slots_T, self._tables, strict=True)
        ]

    def _upload(self, *columns: NDArray[np.integer]) -> tuple[torch.Tensor, ...]:
        """Equally long integer columns as int64 tensors on the device, in one copy."""
        return to_device(np.stack(columns).astype(np.int64, copy=False), self._device).unbind()
