"""The rows whose requests change their logits: their rules, and the record of what they drew.

R rows that draw, U of them with rules, N of those with a record, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from atom.messages.engine import LogitsProcessors
from atom.messages.worker import NewRow
from atom_ops import LogitsProcessorBatch, TokenRecord, apply_logits_processors, record_sampled, to_device
from atom_ops.ops.logits_processors import ANY, AllowedIds, BadWords, Bias, EndIds, Penalties, RecordedRows

Ids = NDArray[np.int64]
_FIRST_RECORDS = 4


@dataclass(frozen=True, slots=True)
class RowLogitsProcessors:
    """One row's rules as arrays, ready to be joined with those of other rows."""

    allowed: Ids
    bias_ids: Ids
    """With the bad words of one id, which are forbidden whatever came before."""
    bias_values: NDArray[np.float32]
    words: list[list[int]]
    """Bad words of two ids or more."""
    end_ids: Ids
    end_until: int
    """First position where one of `end_ids` may be drawn."""
    penalties: tuple[float, float, float]
    """Repetition, frequency, presence."""
    record: int
    """-1 for a row that needs none."""
    offset: int
    """The token at position p of the sequence is entry p - offset of the record."""
    begin: int
    """Entry of the first generated id."""


@dataclass(frozen=True, slots=True)
class LogitsProcessorRows:
    """Those of a step's rows that have rules."""

    rows: Ids
    """Which of the R."""
    rules: LogitsProcessorBatch
    recorded: Ids
    """Which of the R have a record."""
    offsets: Ids
    """Of those."""


class LogitsProcessorState:
    """Rules and records of the rows of the persistent batch.

    Penalties, and bad words of several ids, need a record on the device. Records are made as
    rows need them and used again by later ones, so that they take 4 * (V + max_model_len) bytes
    for each row that has had one at the busiest time, rounded up to a power of two of rows:
    0.7 MB a row for 151,936 ids and sequences of 32,768.
    """

    def __init__(self, vocab_size: int, max_model_len: int, device: torch.device):
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, RowLogitsProcessors] = {}
        self._free: list[int] = []
        self._record = TokenRecord(
            torch.zeros(0, max_model_len, dtype=torch.int32, device=device),
            torch.zeros(0, vocab_size, dtype=torch.int32, device=device),
        )

    def set_row(self, new: NewRow) -> None:
        """A new request takes a row; what the row held before is forgotten."""
        former = self._rows.pop(new.row, None)
        if former is not None and former.record >= 0:
            self._free.append(former.record)
        rules = new.sampling.logits_processors
        if rules is not None:
            self._rows[new.row] = self._admit(rules, new)

    def gather(self, rows: Ids) -> LogitsProcessorRows | None:
        """What `apply` needs to know of the rows that draw; None where none of them has rules."""
        if not self._rows:
            return None
        which = np.array([i for i, row in enumerate(rows.tolist()) if row in self._rows], np.int64)
        if not len(which):
            return None
        members = [self._rows[row] for row in rows[which].tolist()]
        recorded = [u for u, member in enumerate(members) if member.record >= 0]
        keepers = [members[u] for u in recorded]
        batch = LogitsProcessorBatch(
            rows_U=to_device(which, self._device),
            allowed=self._allowed(members),
            bias=self._bias(members),
            end_ids=self._end_ids(members),
            recorded=self._recorded(recorded, keepers),
            bad_words=self._bad_words(recorded, keepers),
            penalties=self._penalties(keepers),
        )
        offsets = np.array([keeper.offset for keeper in keepers], np.int64)
        return LogitsProcessorRows(which, batch, which[np.array(recorded, np.int64)], offsets)

    def apply(
        self, draw: LogitsProcessorRows, logits_RV: torch.Tensor, positions_R: torch.Tensor, positions: Ids
    ) -> torch.Tensor:
        """Logits of the ruled rows, float32 [U, V]; `positions` are the same [R] on the host."""
        longest = int((positions[draw.recorded] - draw.offsets).max(initial=0))
        return apply_logits_processors(logits_RV, positions_R, draw.rules, self._record, longest)

    def keep(self, draw: LogitsProcessorRows, positions_U: torch.Tensor, ids_U: torch.Tensor) -> None:
        """Enter the ids that the ruled rows drew into their records."""
        if draw.rules.recorded is not None:
            record_sampled(self._record, draw.rules.recorded, positions_U, ids_U)

    def _admit(self, rules: LogitsProcessors, new: NewRow) -> RowLogitsProcessors:
        penalties = (rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty)
        words = [word for word in rules.bad_words if len(word) > 1]
        banned = [word[0] for word in rules.bad_words if len(word) == 1]
        prompt = _ids(new.prompt_ids)
        return RowLogitsProcessors(
            allowed=_ids(rules.allowed_ids),
            bias_ids=np.concatenate([_ids(rules.bias_ids), np.array(banned, np.int64)]),
            bias_values=np.array([*rules.bias_values, *[-np.inf] * len(banned)], np.float32),
            words=words,
            end_ids=np.array(rules.end_ids if rules.min_tokens else [], np.int64),
            end_until=new.prompt_length + rules.min_tokens,
            penalties=penalties,
            record=self._new_record(prompt, _ids(new.output_ids)) if rules.needs_output_ids else -1,
            offset=new.prompt_length - len(prompt),
            begin=len(prompt),
        )

    def _new_record(self, prompt: Ids, generated: Ids) -> int:
        """A record that holds these ids and nothing of its former row."""
        if not self._free:
            self._grow()
        record = self._free.pop()
        seen_V = self._record.seen_MV[record].zero_()
        if len(prompt) + len(generated):
            weights = np.repeat([1, 2], [len(prompt), len(generated)])
            ids, weights = to_device(np.stack([np.concatenate([prompt, generated]), weights]), self._device)
            self._record.ids_ML[record, : len(ids)] = ids
            seen_V.index_add_(0, ids, weights.int())
        return record

    def _grow(self) -> None:
        """Twice as many records."""
        ids_ML, seen_MV = self._record.ids_ML, self._record.seen_MV
        before = len(ids_ML)
        more = before or _FIRST_RECORDS
        self._record = TokenRecord(
            torch.cat((ids_ML, ids_ML.new_zeros(more, ids_ML.shape[1]))),
            torch.cat((seen_MV, seen_MV.new_zeros(more, seen_MV.shape[1]))),
        )
        self._free.extend(range(before, before + more))

    def _allowed(self, members: Sequence[RowLogitsProcessors]) -> AllowedIds | None:
        rows = np.array([u for u, member in enumerate(members) if len(member.allowed)], np.int64)
        if not len(rows):
            return None
        places = self._places(enumerate(member.allowed for member in members))
        return AllowedIds(to_device(rows, self._device), to_device(places, self._device))

    def _bias(self, members: Sequence[RowLogitsProcessors]) -> Bias | None:
        places = self._places(enumerate(member.bias_ids for member in members))
        if not len(places):
            return None
        values = np.concatenate([member.bias_values for member in members])
        return Bias(to_device(places, self._device), to_device(values, self._device))

    def _end_ids(self, members: Sequence[RowLogitsProcessors]) -> EndIds | None:
        places = self._places(enumerate(member.end_ids for member in members))
        if not len(places):
            return None
        counts = [len(member.end_ids) for member in members]
        until = np.repeat([member.end_until for member in members], counts)
        rows = np.repeat(np.arange(len(members)), counts)
        return EndIds(*to_device(np.stack([rows, until, places]), self._device))

    def _recorded(self, which: Sequence[int], keepers: Sequence[RowLogitsProcessors]) -> RecordedRows | None:
        if not keepers:
            return None
        records = [keeper.record for keeper in keepers]
        offsets = [keeper.offset for keeper in keepers]
        return RecordedRows(*to_device(np.array([which, records, offsets], np.int64), self._device))

    def _bad_words(self, which: Sequence[int], keepers: Sequence[RowLogitsProcessors]) -> BadWords | None:
        owned = [(n, word) for n, keeper in enumerate(keepers) for word in keeper.words]
        if not owned:
            return None
        before = np.full((len(owned), max(len(word) for _, word in owned) - 1), ANY, np.int64)
        for b, (_, word) in enumerate(owned):
            before[b, before.shape[1] - len(word) + 1 :] = word[:-1]
        rows = [n for n, _ in owned]
        begins = [keepers[n].begin for n in rows]
        places = [which[n] * self._vocab_size + word[-1] for n, word in owned]
        columns = to_device(np.array([rows, begins, places], np.int64), self._device)
        return BadWords(columns[0], to_device(before, self._device), columns[1], columns[2])

    def _penalties(self, keepers: Sequence[RowLogitsProcessors]) -> Penalties | None:
        if all(keeper.penalties == (1, 0, 0) for keeper in keepers):
            return None
        columns = np.array([keeper.penalties for keeper in keepers], np.float32).T.copy()
        return Penalties(*to_device(columns, self._device))

    def _places(self, lists: Iterable[tuple[int, Ids]]) -> Ids:
        """Where the ids of each (row, ids) are among all logits of the ruled rows."""
        return np.concatenate([u * self._vocab_size + ids for u, ids in lists])


def _ids(packed: bytes) -> Ids:
    return np.frombuffer(packed, np.dtype("<i4")).astype(np.int64)
