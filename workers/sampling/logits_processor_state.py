"""Logits processors of the rows of the persistent batch, and the token records they need.

R rows sampled in a step, U of them with logits processors, N of the U with a token record, V vocabulary.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.messages.engine import LogitsProcessors
from atom.shared.messages.worker import NewRow
from atom_ops import LogitsProcessorBatch, TokenRecord, apply_logits_processors, record_sampled, to_device
from atom_ops.ops.sampling.logits_processors import (
    ANY,
    AllowedIds,
    BadWords,
    Bias,
    EndIds,
    Penalties,
    RecordedRows,
)
from workers.batch.block_table import BatchLimits

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowLogitsProcessors:
    """One row's logits processors as arrays, ready to be joined with those of other rows."""

    allowed: Ids
    bias_ids: Ids
    """Including bad words of one id, with a bias of minus infinity."""
    bias_values: NDArray[np.float32]
    words: list[list[int]]
    """Bad words of two ids or more."""
    end_ids: Ids
    end_until: int
    """First position where one of `end_ids` may be sampled."""
    penalties: tuple[float, float, float]
    """Repetition, frequency, presence."""
    record: int
    """Index of its token record, which is the row; -1 if it needs none."""
    offset: int
    """The token at position p of the sequence is entry p - offset of the record."""
    begin: int
    """Entry of the first generated id."""


@dataclass(frozen=True, slots=True)
class LogitsProcessorRows:
    """The rows of a step that have logits processors."""

    indices: Ids
    """Indices among the R rows."""
    batch: LogitsProcessorBatch
    recorded: Ids
    """Indices, among the R rows, of those with a token record."""
    offsets: Ids
    """The `offset` of each of these records: the token at position p is entry p - offset."""


class LogitsProcessorState:
    """Logits processors and token records of all rows.

    Penalties, and bad words of several ids, need a record on the device. Every row has one, allocated
    in advance so that no step needs memory for it: 4 * (V + max_model_len) bytes for each row, 0.7 MB
    for 151,936 ids and sequences of 32,768. On a CPU its pages are resident only once they are used.
    """

    def __init__(self, limits: BatchLimits, vocab_size: int, device: torch.device):
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, RowLogitsProcessors] = {}
        self._record = TokenRecord(
            torch.empty(limits.max_rows, limits.max_model_len, dtype=torch.int32, device=device),
            torch.empty(limits.max_rows, vocab_size, dtype=torch.int32, device=device),
        )

    @property
    def rows(self) -> Set[int]:
        """Rows with logits processors or a grammar."""
        return self._rows.keys()

    def set_row(self, new: NewRow) -> bool:
        """Set the logits processors of a row that is assigned to a new request; returns True.

        If the device has too little memory, raises torch.OutOfMemoryError and the row has none.
        """
        self._rows.pop(new.row, None)
        processors = new.sampling.logits_processors
        if processors is None and new.grammar is not None:
            processors = LogitsProcessors()
        if processors is not None:
            self._rows[new.row] = self._add(processors, new)
        return True

    def indices(self, rows: Ids) -> Ids:
        """Indices of the rows with logits processors or a grammar, among `rows`."""
        return np.array([i for i, row in enumerate(rows.tolist()) if row in self._rows], np.int64)

    def gather(self, rows: Ids, which: Ids | None = None) -> LogitsProcessorRows | None:
        """The inputs of `apply` for the rows with logits processors; None if there are none.

        `which`: of these `indices` only.
        """
        if which is None:
            which = self.indices(rows)
        if not len(which):
            return None
        processors = [self._rows[row] for row in rows[which].tolist()]
        which_recorded = [u for u, row in enumerate(processors) if row.record >= 0]
        recorded = [processors[u] for u in which_recorded]
        batch = LogitsProcessorBatch(
            rows_U=to_device(which, self._device),
            allowed=self._allowed(processors),
            bias=self._bias(processors),
            end_ids=self._end_ids(processors),
            recorded=self._recorded(which_recorded, recorded),
            bad_words=self._bad_words(which_recorded, recorded),
            penalties=self._penalties(recorded),
        )
        offsets = np.array([row.offset for row in recorded], np.int64)
        return LogitsProcessorRows(which, batch, which[np.array(which_recorded, np.int64)], offsets)

    def apply(
        self, rows: LogitsProcessorRows, logits_RV: torch.Tensor, positions_R: torch.Tensor, positions: Ids
    ) -> torch.Tensor:
        """Processed logits, float32 [U, V]; `positions` [R] is `positions_R` on the host."""
        longest = int((positions[rows.recorded] - rows.offsets).max(initial=0))
        return apply_logits_processors(logits_RV, positions_R, rows.batch, self._record, longest)

    def record(
        self,
        rows: LogitsProcessorRows,
        positions_U: torch.Tensor,
        ids_U: torch.Tensor,
        kept_U: torch.Tensor | None = None,
    ) -> None:
        """Add the sampled ids of the U rows to their records; with `kept_U` (bool), of these only."""
        if rows.batch.recorded is not None:
            record_sampled(self._record, rows.batch.recorded, positions_U, ids_U, kept_U)

    def _add(self, processors: LogitsProcessors, new: NewRow) -> RowLogitsProcessors:
        penalties = (processors.repetition_penalty, processors.frequency_penalty, processors.presence_penalty)
        words = [word for word in processors.bad_words if len(word) > 1]
        banned = [word[0] for word in processors.bad_words if len(word) == 1]
        prompt = _ids(new.prompt_ids)
        needs_record = processors.needs_output_ids
        if needs_record:
            self._fill_record(new.row, prompt, _ids(new.output_ids))
        return RowLogitsProcessors(
            allowed=_ids(processors.allowed_ids),
            bias_ids=np.concatenate([_ids(processors.bias_ids), np.array(banned, np.int64)]),
            bias_values=np.array([*processors.bias_values, *[-np.inf] * len(banned)], np.float32),
            words=words,
            end_ids=np.array(processors.end_ids if processors.min_tokens else [], np.int64),
            end_until=new.prompt_length + processors.min_tokens,
            penalties=penalties,
            record=new.row if needs_record else -1,
            offset=new.prompt_length - len(prompt),
            begin=len(prompt),
        )

    def _fill_record(self, row: int, prompt: Ids, generated: Ids) -> None:
        """Replace the content of the row's record by these ids."""
        self._record.ids_ML[row].zero_()
        seen_V = self._record.seen_MV[row].zero_()
        if len(prompt) + len(generated):
            weights = np.repeat([1, 2], [len(prompt), len(generated)])
            ids, weights = to_device(np.stack([np.concatenate([prompt, generated]), weights]), self._device)
            self._record.ids_ML[row, : len(ids)] = ids
            seen_V.index_add_(0, ids, weights.int())

    def _allowed(self, processors: Sequence[RowLogitsProcessors]) -> AllowedIds | None:
        rows = np.array([u for u, row in enumerate(processors) if len(row.allowed)], np.int64)
        if not len(rows):
            return None
        flat_ids = self._flat_ids(enumerate(row.allowed for row in processors))
        return AllowedIds(to_device(rows, self._device), to_device(flat_ids, self._device))

    def _bias(self, processors: Sequence[RowLogitsProcessors]) -> Bias | None:
        flat_ids = self._flat_ids(enumerate(row.bias_ids for row in processors))
        if not len(flat_ids):
            return None
        values = np.concatenate([row.bias_values for row in processors])
        return Bias(to_device(flat_ids, self._device), to_device(values, self._device))

    def _end_ids(self, processors: Sequence[RowLogitsProcessors]) -> EndIds | None:
        flat_ids = self._flat_ids(enumerate(row.end_ids for row in processors))
        if not len(flat_ids):
            return None
        counts = [len(row.end_ids) for row in processors]
        until = np.repeat([row.end_until for row in processors], counts)
        rows = np.repeat(np.arange(len(processors)), counts)
        return EndIds(*to_device(np.stack([rows, until, flat_ids]), self._device))

    def _recorded(self, which: Sequence[int], recorded: Sequence[RowLogitsProcessors]) -> RecordedRows | None:
        if not recorded:
            return None
        records = [row.record for row in recorded]
        offsets = [row.offset for row in recorded]
        return RecordedRows(*to_device(np.array([which, records, offsets], np.int64), self._device))

    def _bad_words(self, which: Sequence[int], recorded: Sequence[RowLogitsProcessors]) -> BadWords | None:
        words = [(n, word) for n, row in enumerate(recorded) for word in row.words]
        if not words:
            return None
        before = np.full((len(words), max(len(word) for _, word in words) - 1), ANY, np.int64)
        for b, (_, word) in enumerate(words):
            before[b, before.shape[1] - len(word) + 1 :] = word[:-1]
        rows = [n for n, _ in words]
        begins = [recorded[n].begin for n in rows]
        flat_ids = [which[n] * self._vocab_size + word[-1] for n, word in words]
        columns = to_device(np.array([rows, begins, flat_ids], np.int64), self._device)
        return BadWords(columns[0], to_device(before, self._device), columns[1], columns[2])

    def _penalties(self, recorded: Sequence[RowLogitsProcessors]) -> Penalties | None:
        if all(row.penalties == (1, 0, 0) for row in recorded):
            return None
        columns = np.array([row.penalties for row in recorded], np.float32).T.copy()
        return Penalties(*to_device(columns, self._device))

    def _flat_ids(self, lists: Iterable[tuple[int, Ids]]) -> Ids:
        """Indices of each (row, ids) into the flattened logits [U * V]."""
        return np.concatenate([u * self._vocab_size + ids for u, ids in lists])


def _ids(packed: bytes) -> Ids:
    return np.frombuffer(packed, np.dtype("<i4")).astype(np.int64)
