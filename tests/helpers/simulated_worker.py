"""A worker whose KV cache holds, in every slot, which prefix was written there.

A model that computes position p needs the KV of its own prefix in every position it sees. This
worker checks exactly that, so a block that was shared wrongly, reused too early or lost makes
it raise. The token it draws depends on the prefix alone: what a request generates must not
depend on what else runs. Prefixes begin at the row's seed, so that tests can make the KV of
equal tokens differ.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atom.messages.engine import LogprobTable, PromptLogprobs, SampledLogprobs, pack_ids, unpack_ids
from atom.messages.worker import (
    BatchResult,
    FullAttentionSpec,
    KVSpec,
    NewRow,
    RecurrentStateSpec,
    ScheduledBatch,
)

ROOT = 0
Scores = tuple[list[int], list[float], int]
"""Ids, log probabilities and rank: one row of a `LogprobTable`."""


def extend_prefix(prefix: int, token_id: int) -> int:
    """Stands for a token sequence: the prefix and one more id."""
    return hash((prefix, token_id))


def draw(prefix: int, vocabulary: int) -> int:
    """The id that follows a prefix."""
    return (prefix >> 7) % vocabulary


def scores(prefix: int, token_id: int, width: int, vocabulary: int) -> Scores:
    """What the worker says of a token behind a prefix; the numbers mean nothing, but are nobody else's."""
    ids = [token_id, *((draw(prefix, vocabulary) + place) % vocabulary for place in range(width - 1))]
    values = [-(extend_prefix(prefix, one) % 4096) / 64 for one in ids]  # exact in float32
    return ids, values, 1 + prefix % 1000


def pack_scores(rows: Sequence[Scores], width: int) -> LogprobTable:
    """The table of these rows."""
    ids = array("i", [one for row in rows for one in row[0]])
    values = struct.pack(f"<{len(ids)}f", *(value for row in rows for value in row[1]))
    return LogprobTable(width, ids.tobytes(), values, pack_ids(rank for _, _, rank in rows))


def unpack_scores(table: LogprobTable) -> list[Scores]:
    """The inverse of `pack_scores`."""
    ids, ranks, width = unpack_ids(table.ids), unpack_ids(table.ranks), table.width
    values = struct.unpack(f"<{len(ids)}f", table.values)
    assert len(ids) == len(ranks) * width
    cuts = [slice(row * width, (row + 1) * width) for row in range(len(ranks))]
    return [(list(ids[cut]), list(values[cut]), rank) for cut, rank in zip(cuts, ranks, strict=True)]


def prefixes_of(token_ids: Iterable[int], root: int = ROOT) -> list[int]:
    """Entry n stands for the first n + 1 tokens."""
    prefixes: list[int] = []
    for token_id in token_ids:
        prefixes.append(extend_prefix(prefixes[-1] if prefixes else root, token_id))
    return prefixes


def undisturbed(
    prompt: Sequence[int], max_tokens: int, stop_ids: set[int], vocabulary: int, root: int = ROOT
) -> list[int]:
    """What a request generates when it is alone."""
    prefix = root
    for token_id in prompt:
        prefix = extend_prefix(prefix, token_id)
    generated: list[int] = []
    while len(generated) < max_tokens and not stop_ids.intersection(generated[-1:]):
        generated.append(draw(prefix, vocabulary))
        prefix = extend_prefix(prefix, generated[-1])
    return generated


@dataclass
class Row:
    """One row of the persistent batch: ids known or drawn, prefixes[p] ends with position p."""

    token_ids: list[int]
    prefixes: list[int]
    new: NewRow
    computed: int
    tables: list[list[int]]


class SimulatedWorker:
    """Executes batches in the order they come."""

    def __init__(
        self, specs: Sequence[KVSpec], num_blocks: Sequence[int], vocabulary: int, limits: tuple[int, int]
    ):
        """`limits`: most rows, and most tokens in a step."""
        self._specs = list(specs)
        self._slots: list[list[int | None]] = [
            [None] * (blocks * (1 if isinstance(spec, RecurrentStateSpec) else spec.block_size))
            for spec, blocks in zip(specs, num_blocks, strict=True)
        ]
        self._vocabulary = vocabulary
        self._max_rows, self._max_tokens = limits
        self._rows: dict[int, Row] = {}
        self._step = 0

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        """Raises AssertionError when a row would read KV that is not its own."""
        self._step += 1
        assert batch.step == self._step, "a step is missing"
        self._apply(batch)
        counts = batch.counts or [1] * len(batch.rows)
        assert len(set(batch.rows)) == len(batch.rows) == len(counts), "rows and counts do not match"
        assert all(0 <= row < self._max_rows for row in batch.rows), "a row is out of range"
        assert 0 < sum(counts) <= self._max_tokens and min(counts) > 0, "the step breaks the token budget"
        work = [(self._rows[row], count) for row, count in zip(batch.rows, counts, strict=True)]
        for row, count in work:
            self._advance_states(row, count)
        # Each layer writes the KV of all rows before any of them attends.
        for row, count in work:
            self._write(row, count)
        for row, count in work:
            self._read(row, count)
        prompt_logprobs = self._prompt_logprobs(batch.rows, counts)
        drawers = self._draw(work)
        ids = pack_ids(row.token_ids[-1] for row in drawers)
        return BatchResult(batch.step, ids, self._drawn_logprobs(drawers), prompt_logprobs)

    def _apply(self, batch: ScheduledBatch) -> None:
        for new in batch.new_rows:
            token_ids = list(unpack_ids(new.token_ids))
            prefixes = prefixes_of(token_ids, new.sampling.seed)
            tables = [list(table) for table in new.block_ids]
            self._rows[new.row] = Row(token_ids, prefixes, new, new.computed, tables)
        for more in batch.more_blocks:
            assert more.row in batch.rows, "blocks for a row that does not run"
            for table, added in zip(self._rows[more.row].tables, more.block_ids, strict=True):
                table.extend(added)

    def _advance_states(self, row: Row, count: int) -> None:
        """A row's first token starts a state; every other one needs the state behind the one before."""
        for group, spec in enumerate(self._specs):
            if isinstance(spec, RecurrentStateSpec):
                (slot,) = row.tables[group]
                before = row.prefixes[row.computed - 1] if row.computed else None
                found = self._slots[group][slot]
                assert row.computed == 0 or found == before, f"step {self._step}: a foreign state"
                self._slots[group][slot] = row.prefixes[row.computed + count - 1]

    def _write(self, row: Row, count: int) -> None:
        assert row.computed + count <= len(row.token_ids), "a row computes a token that nobody knows"
        for group, spec in enumerate(self._specs):
            if isinstance(spec, RecurrentStateSpec):
                continue
            for position in range(row.computed, row.computed + count):
                self._slots[group][self._slot(row, group, position)] = row.prefixes[position]

    def _read(self, row: Row, count: int) -> None:
        for group, spec in enumerate(self._specs):
            if isinstance(spec, RecurrentStateSpec):
                continue
            end = row.computed + count
            first = 0 if isinstance(spec, FullAttentionSpec) else max(0, row.computed - spec.window + 1)
            for position in range(first, end):
                found = self._slots[group][self._slot(row, group, position)]
                assert found == row.prefixes[position], (
                    f"step {self._step}: foreign KV at position {position}"
                )

    def _slot(self, row: Row, group: int, position: int) -> int:
        spec = self._specs[group]
        assert not isinstance(spec, RecurrentStateSpec)
        size = spec.block_size
        return row.tables[group][position // size] * size + position % size

    def _draw(self, work: list[tuple[Row, int]]) -> list[Row]:
        """Count the tokens as computed; returns the rows that draw, each with one token more."""
        drawers = []
        for row, count in work:
            row.computed += count
            if row.computed == len(row.token_ids):
                row.token_ids.append(draw(row.prefixes[-1], self._vocabulary))
                row.prefixes.append(extend_prefix(row.prefixes[-1], row.token_ids[-1]))
                drawers.append(row)
        return drawers

    def _drawn_logprobs(self, drawers: list[Row]) -> SampledLogprobs | None:
        """As wide as whoever wants most."""
        asking = [index for index, row in enumerate(drawers) if row.new.sampling.logprobs >= 0]
        if not asking:
            return None
        width = 1 + max(drawers[index].new.sampling.logprobs for index in asking)
        rows = [self._score(drawers[index], len(drawers[index].token_ids) - 1, width) for index in asking]
        return SampledLogprobs(asking, pack_scores(rows, width))

    def _prompt_logprobs(self, numbers: list[int], counts: list[int]) -> list[PromptLogprobs]:
        """Of the tokens that follow those computed, as far as the prompt goes."""
        pieces = []
        for number, count in zip(numbers, counts, strict=True):
            row = self._rows[number]
            start, end = row.computed + 1, min(row.computed + count + 1, row.new.prompt_length)
            if row.new.prompt_logprobs >= 0 and start < end:
                width = 1 + row.new.prompt_logprobs
                table = pack_scores([self._score(row, at, width) for at in range(start, end)], width)
                pieces.append(PromptLogprobs(number, start, table))
        return pieces

    def _score(self, row: Row, position: int, width: int) -> Scores:
        return scores(row.prefixes[position - 1], row.token_ids[position], width, self._vocabulary)
