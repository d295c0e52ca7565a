"""Logits processors, and the record of each row's tokens that penalties and bad words need.

U of the R sampling rows have logits processors, N of these a token record; B bad words of up to
J + 1 ids, E entries of lists over several rows, M records, L ids in the longest record.
Processors are sparse: they change only the logits of listed ids. Lists hold flat indices
u * V + id ("places").
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.tolerances import EXACT

ANY = -1
"""Left padding of bad words that are shorter than the longest; matches any id or none."""


_RECORD_SLICE = 1 << 22
"""Entries of records processed at a time: bounds the memory of the penalties to about 200 MB."""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The ids of M sequences, in order and as counts."""

    ids_ML: Tensor
    """int32: the prompt's distinct ids, if a processor needs them, then every generated id."""
    seen_MV: Tensor
    """int32: 2 * (times that the id was generated) + 1 if it is among the prompt's recorded ids."""


@dataclass(frozen=True, slots=True)
class RecordedRows:
    """The N rows that have a token record."""

    rows_N: Tensor
    """int64: indices among the U rows."""
    records_N: Tensor
    """int64: indices among the M records."""
    offsets_N: Tensor
    """int64: the token at position p of the sequence is entry p - offset of the record."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """float32, for the rows with a record; the neutral values are 1, 0 and 0."""

    repetition_N: Tensor
    frequency_N: Tensor
    presence_N: Tensor


@dataclass(frozen=True, slots=True)
class AllowedIds:
    """Rows that may sample only the listed ids."""

    rows: Tensor
    """int64: indices among the U rows."""
    places_E: Tensor
    """int64."""


@dataclass(frozen=True, slots=True)
class BadWords:
    """Sequences of two ids or more whose last id must not follow the others."""

    rows_B: Tensor
    """int64: indices among the N rows."""
    before_BJ: Tensor
    """int64: the ids before the last, left-padded with `ANY`."""
    begins_B: Tensor
    """int64: the entry of the row's record that holds its first generated id."""
    places_B: Tensor
    """int64: places of the last ids."""


@dataclass(frozen=True, slots=True)
class EndIds:
    """Ids that must not be sampled before a position (min_tokens)."""

    rows_E: Tensor
    """int64: indices among the U rows."""
    until_E: Tensor
    """int64: the first position at which the id may be sampled."""
    places_E: Tensor
    """int64."""


@dataclass(frozen=True, slots=True)
class Bias:
    """Values added to logits; minus infinity bans an id."""

    places_E: Tensor
    """int64."""
    values_E: Tensor
    """float32."""


@dataclass(frozen=True, slots=True)
class LogitsProcessorBatch:
    """The logits processors of U rows; None for a processor that no row has."""

    rows_U: Tensor
    """int64: indices among the R rows."""
    allowed: AllowedIds | None = None
    bias: Bias | None = None
    end_ids: EndIds | None = None
    recorded: RecordedRows | None = None
    bad_words: BadWords | None = None
    """Requires `recorded`."""
    penalties: Penalties | None = None
    """Requires `recorded`."""


def _case(rows: int, vocabulary: int) -> Case:
    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, LogitsProcessorBatch, TokenRecord, int]:
        def pick(limit: int, *shape: int) -> Tensor:
            return torch.randint(0, limit, shape, generator=generator)

        logits = (torch.randn(rows + 1, vocabulary, generator=generator) * 4).to(dtype)
        which = torch.arange(rows)
        ids = pick(vocabulary, rows, 9).int()
        seen = torch.zeros(rows, vocabulary, dtype=torch.int32)
        seen.scatter_add_(1, ids.long(), torch.full_like(ids, 2)).scatter_(1, ids[:, :1].long(), 1)
        processors = LogitsProcessorBatch(
            rows_U=which + 1,
            allowed=AllowedIds(which[:1], pick(vocabulary, vocabulary // 2)),
            bias=Bias(which * vocabulary + pick(vocabulary, rows), torch.linspace(-3, 3, rows)),
            end_ids=EndIds(which, which + 5, which * vocabulary + pick(vocabulary, rows)),
            recorded=RecordedRows(which, which.flip(0), which % 3),
            bad_words=BadWords(which, ids[:, 5:6].flip(0).long(), which % 2, which * vocabulary),
            penalties=Penalties(*torch.rand(3, rows, generator=generator).add_(0.5)),
        )
        return logits, torch.full((rows + 1,), 6), processors, TokenRecord(ids, seen), 9

    return Case(f"{rows}x{vocabulary}", make)


@op([_case(1, 50), _case(17, 700)], EXACT)
def apply_logits_processors(
    logits_RV: Tensor,
    positions_R: Tensor,
    processors: LogitsProcessorBatch,
    record: TokenRecord,
    longest: int,
) -> Tensor:
    """The processed logits of the rows with logits processors, float32 [U, V].

    `positions_R` (int64) are the sequence positions of the tokens to sample; no record of these
    rows has more than `longest` ids. `atom.shared.messages.engine.LogitsProcessors` defines the processors
    and their order.

    A row whose ids are all excluded is all minus infinity; `sample` then returns some id of the
    vocabulary.
    """
    logits_UV = logits_RV.index_select(0, processors.rows_U).float()
    positions_U = positions_R.index_select(0, processors.rows_U)
    flat = logits_UV.view(-1)
    if processors.allowed is not None:
        kept = flat[processors.allowed.places_E]
        logits_UV.index_fill_(0, processors.allowed.rows, -torch.inf)
        flat.index_copy_(0, processors.allowed.places_E, kept)
    # Added and not written, because a list may hold an id twice.
    if processors.bias is not None:
        flat.index_add_(0, processors.bias.places_E, processors.bias.values_E)
    if processors.end_ids is not None:
        early_E = positions_U[processors.end_ids.rows_E] < processors.end_ids.until_E
        flat.index_add_(0, processors.end_ids.places_E, _infinite_where(early_E))
    if processors.recorded is not None:
        entries_N = positions_U[processors.recorded.rows_N] - processors.recorded.offsets_N
        if processors.bad_words is not None:
            complete_B = _completes(processors.bad_words, processors.recorded, record, entries_N)
            flat.index_add_(0, processors.bad_words.places_B, _infinite_where(complete_B))
        if processors.penalties is not None:
            _apply_penalties(logits_UV, processors.penalties, processors.recorded, record, longest)
    return logits_UV


def _infinite_where(excluded: Tensor) -> Tensor:
    """Minus infinity where `excluded`, 0 elsewhere."""
    return torch.zeros(excluded.shape, device=excluded.device).masked_fill_(excluded, -torch.inf)


def _completes(words: BadWords, rows: RecordedRows, record: TokenRecord, entries_N: Tensor) -> Tensor:
    """Whether the last generated ids equal each word's ids before its last, bool [B]."""
    back_J = torch.arange(-words.before_BJ.shape[1], 0, device=entries_N.device)
    entries_BJ = entries_N[words.rows_B][:, None] + back_J
    records_B1 = rows.records_N[words.rows_B][:, None]
    last_BJ = record.ids_ML[records_B1, entries_BJ.clamp(min=0)]
    generated_BJ = entries_BJ >= words.begins_B[:, None]
    same_BJ = generated_BJ & (last_BJ == words.before_BJ)
    return (same_BJ | (words.before_BJ == ANY)).all(-1)


def _apply_penalties(
    logits_UV: Tensor, penalties: Penalties, rows: RecordedRows, record: TokenRecord, longest: int
) -> None:
    """Apply the penalties to the logits of recorded ids, in place, in slices of rows of bounded memory.

    Entries past the end of a record may hold any id; its count in `seen` decides. An id with
    several entries gets the same value several times.
    """
    size = max(1, _RECORD_SLICE // max(longest, 1))
    columns = (
        rows.rows_N,
        rows.records_N,
        penalties.repetition_N,
        penalties.frequency_N,
        penalties.presence_N,
    )
    for rows_N, records_N, *values_N in zip(*(column.split(size) for column in columns), strict=True):
        repetition_N1, frequency_N1, presence_N1 = (value_N[:, None] for value_N in values_N)
        vocabulary = logits_UV.shape[1]
        ids_NL = record.ids_ML[:, :longest].index_select(0, records_N).long()
        seen_NL = record.seen_MV.view(-1)[records_N[:, None] * vocabulary + ids_NL]
        places_NL = rows_N[:, None] * vocabulary + ids_NL
        logits_NL = logits_UV.view(-1)[places_NL]
        repeated_NL = torch.where(logits_NL > 0, logits_NL / repetition_N1, logits_NL * repetition_N1)
        logits_NL = torch.where(seen_NL > 0, repeated_NL, logits_NL)
        times_NL = seen_NL >> 1
        logits_NL -= frequency_N1 * times_NL
        logits_NL -= presence_N1 * (times_NL > 0)
        logits_UV.view(-1)[places_NL] = logits_NL


def _record_case(rows: int, vocabulary: int, drafts: bool = False) -> Case:
    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[TokenRecord, RecordedRows, Tensor, Tensor, Tensor | None]:
        which = torch.randperm(rows + 2, generator=generator)[:rows]
        record = TokenRecord(
            torch.zeros(rows + 2, 9, dtype=torch.int32),
            torch.ones(rows + 2, vocabulary, dtype=torch.int32),
        )
        recorded = RecordedRows(torch.arange(rows), which, which % 4)
        ids = torch.randint(0, vocabulary, (rows,), generator=generator)
        kept = torch.rand(rows, generator=generator) < 0.5 if drafts else None
        return record, recorded, which % 4 + which % 9, ids, kept

    return Case(f"{rows}x{vocabulary}{'-kept' if drafts else ''}", make)


@op([_record_case(1, 50), _record_case(17, 700), _record_case(17, 700, drafts=True)], EXACT)
def record_sampled(
    record: TokenRecord, rows: RecordedRows, positions_U: Tensor, ids_U: Tensor, kept_U: Tensor | None = None
) -> None:
    """Add each row's sampled id (int64) at its position (int64) to its record, in place.

    With `kept_U` (bool), for these rows only.
    """
    ids_N = ids_U[rows.rows_N]
    entries_N = positions_U[rows.rows_N] - rows.offsets_N
    places_N = rows.records_N * record.seen_MV.shape[1] + ids_N
    if kept_U is None:
        record.ids_ML[rows.records_N, entries_N] = ids_N.int()
        record.seen_MV.view(-1)[places_N] += 2
        return
    kept_N = kept_U[rows.rows_N]
    entries_N = entries_N.where(kept_N, 0)
    record.ids_ML[rows.records_N, entries_N] = ids_N.int().where(
        kept_N, record.ids_ML[rows.records_N, entries_N]
    )
    record.seen_MV.view(-1)[places_N] += 2 * kept_N
