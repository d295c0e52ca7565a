"""A worker whose KV cache holds, in every slot, which prefix was written there.

A model that computes position p needs the KV of its own prefix in every position it sees. This
worker checks exactly that, so a block that was shared wrongly, reused too early or lost makes
it raise. The token it draws depends on the prefix alone: what a request generates must not
depend on what else runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from atom.messages.engine import pack_ids, unpack_ids
from atom.messages.worker import BatchResult, FullAttentionSpec, KVSpec, ScheduledBatch

ROOT = 0


def extend_prefix(prefix: int, token_id: int) -> int:
    """Stands for a token sequence: the prefix and one more id."""
    return hash((prefix, token_id))


def draw(prefix: int, vocabulary: int) -> int:
    """The id that follows a prefix."""
    return (prefix >> 7) % vocabulary


def undisturbed(prompt: Sequence[int], max_tokens: int, stop_ids: set[int], vocabulary: int) -> list[int]:
    """What a request generates when it is alone."""
    prefix = ROOT
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
            [None] * (blocks * spec.block_size) for spec, blocks in zip(specs, num_blocks, strict=True)
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
        # Each layer writes the KV of all rows before any of them attends.
        for row, count in work:
            self._write(row, count)
        for row, count in work:
            self._read(row, count)
        return BatchResult(batch.step, pack_ids(self._draw(work)))

    def _apply(self, batch: ScheduledBatch) -> None:
        for new in batch.new_rows:
            token_ids = list(unpack_ids(new.token_ids))
            prefixes: list[int] = []
            for token_id in token_ids:
                prefixes.append(extend_prefix(prefixes[-1] if prefixes else ROOT, token_id))
            self._rows[new.row] = Row(token_ids, prefixes, new.computed, [list(t) for t in new.block_ids])
        for more in batch.more_blocks:
            assert more.row in batch.rows, "blocks for a row that does not run"
            for table, added in zip(self._rows[more.row].tables, more.block_ids, strict=True):
                table.extend(added)

    def _write(self, row: Row, count: int) -> None:
        assert row.computed + count <= len(row.token_ids), "a row computes a token that nobody knows"
        for group in range(len(self._specs)):
            for position in range(row.computed, row.computed + count):
                self._slots[group][self._slot(row, group, position)] = row.prefixes[position]

    def _read(self, row: Row, count: int) -> None:
        for group, spec in enumerate(self._specs):
            end = row.computed + count
            first = 0 if isinstance(spec, FullAttentionSpec) else max(0, row.computed - spec.window + 1)
            for position in range(first, end):
                found = self._slots[group][self._slot(row, group, position)]
                assert found == row.prefixes[position], (
                    f"step {self._step}: foreign KV at position {position}"
                )

    def _slot(self, row: Row, group: int, position: int) -> int:
        size = self._specs[group].block_size
        return row.tables[group][position // size] * size + position % size

    def _draw(self, work: list[tuple[Row, int]]) -> list[int]:
        drawn = []
        for row, count in work:
            row.computed += count
            if row.computed == len(row.token_ids):
                drawn.append(draw(row.prefixes[-1], self._vocabulary))
                row.token_ids.append(drawn[-1])
                row.prefixes.append(extend_prefix(row.prefixes[-1], drawn[-1]))
        return drawn
