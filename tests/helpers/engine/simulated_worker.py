"""A worker whose KV cache holds, in every slot, the prefix that was written there.

A model that computes position p needs the KV of its own prefix in every position it attends to. This
worker checks exactly that: a block that is shared wrongly, reused too early or lost raises an error.
The sampled token depends on the prefix alone, so what a request generates must not depend on other
requests. Prefixes begin at the row's seed, so that tests can make the KV of equal tokens differ.

With drafts, a decoding row also writes the prefixes of its draft tokens. Those of rejected drafts are
wrong, and a later step must write the right ones before anything reads them.

A row that is late samples wrong tokens, which are in no result, until it is assigned again.

A row that fails leaves `INVALID` in its slots. A row that reads such a slot is invalid too: it samples
a wrong token, and the tests find it where that token reaches a client.
"""

import struct
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from atom.shared.messages.engine import LogprobTable, PromptLogprobs, SampledLogprobs, pack_ids, unpack_ids
from atom.shared.messages.kv_tiers import BlocksCopied, BlocksFound, CopyBlocks, FindBlocks
from atom.shared.messages.worker import (
    BatchResult,
    FullAttentionSpec,
    KVSpec,
    NewRow,
    RecurrentStateSpec,
    RowFailure,
    ScheduledBatch,
    StateCopy,
)

ROOT = 0
INVALID = -1
FAILURE = "out of memory"
Scores = tuple[list[int], list[float], int]
"""Ids, log probabilities and rank: one row of a `LogprobTable`."""


def extend_prefix(prefix: int, token_id: int) -> int:
    """A hash that represents a token sequence: the prefix and one more id."""
    return hash((prefix, token_id))


def sample(prefix: int, vocabulary: int) -> int:
    """The id that follows a prefix."""
    return (prefix >> 7) % vocabulary


def scores(prefix: int, token_id: int, width: int, vocabulary: int) -> Scores:
    """Log probabilities of a token after a prefix; the numbers mean nothing, but differ for each prefix."""
    ids = [token_id, *((sample(prefix, vocabulary) + place) % vocabulary for place in range(width - 1))]
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
    """Entry n represents the first n + 1 tokens."""
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
        generated.append(sample(prefix, vocabulary))
        prefix = extend_prefix(prefix, generated[-1])
    return generated


@dataclass
class Row:
    """One row of the persistent batch: known and sampled ids, prefixes[p] ends with position p."""

    token_ids: list[int]
    prefixes: list[int]
    new: NewRow
    computed: int
    tables: list[list[int]]
    is_valid: bool = True
    is_late: bool = False
    last_drafts: int = 0
    """Drafts of its last step, of which the core may know no result yet."""

    @property
    def decodes(self) -> bool:
        """Whether its known tokens are all computed."""
        return self.computed >= self.new.num_known


@dataclass
class Work:
    """What one row computes in a step."""

    row: Row
    count: int
    written: list[int]
    """The prefixes of its positions from `row.computed` on."""
    num_right: int
    """How many of these are the row's own: all but those after the accepted drafts."""
    num_proposed: int = 0

    @property
    def end(self) -> int:
        """End of the positions whose tokens are the row's own and have a slot."""
        return min(self.row.computed + self.num_right, self.row.new.max_length)

    def prefix(self, position: int) -> int:
        """The one that must be found there."""
        start = self.row.computed
        return self.row.prefixes[position] if position < start else self.written[position - start]


class SimulatedWorker:
    """Executes batches in the order they come."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        num_blocks: Sequence[int],
        vocabulary: int,
        limits: tuple[int, int],
        known_ids: Callable[[NewRow, list[int]], list[int]],
        draft: Callable[[int], tuple[int, int]] = lambda num_drafts: (num_drafts, 0),
        lookahead: int = 0,
        sends_next_ids: bool = False,
    ):
        """`limits`: most rows, and most tokens in a step.

        `known_ids(new, ids)` returns all known ids of a new row that computes `ids` first. `draft(most)`
        returns how many tokens a row proposes, and how many of these are accepted. `lookahead` and
        `sends_next_ids` as in `Limits`: a model drafts.
        """
        self._specs = list(specs)
        self._slots: list[list[int | None]] = [
            [None] * (blocks * (1 if isinstance(spec, RecurrentStateSpec) else spec.block_size))
            for spec, blocks in zip(specs, num_blocks, strict=True)
        ]
        self._vocabulary = vocabulary
        self._max_rows, self._max_tokens = limits
        self._known_ids = known_ids
        self._draft = draft
        self._lookahead = lookahead
        self._sends_next_ids = sends_next_ids
        self._rows: dict[int, Row] = {}
        self._tiers: dict[tuple[int, int, int | bytes], list[int | None]] = {}
        """By tier, group, and slot or digest: what the block had that was copied there."""
        self._step = 0

    def copy(self, message: CopyBlocks, failing: Collection[int] = (), rank: int = 0) -> BlocksCopied:
        """Copy blocks to or from a tier; those of the indices `failing` become unreadable."""
        failed = set(failing)
        for index, copy in enumerate(message.copies):
            spec = self._specs[copy.group]
            size = 1 if isinstance(spec, RecurrentStateSpec) else spec.block_size
            part = slice(copy.block * size, (copy.block + 1) * size)
            place = message.tier, copy.group, copy.digest or copy.slot
            if copy.replaced:
                self._tiers.pop((message.tier, copy.group, copy.replaced), None)
            if message.is_load and copy.digest and place not in self._tiers:
                failed.add(index)
            if message.is_load:
                content = [INVALID] * size if index in failed else self._tiers[place]
                self._slots[copy.group][part] = content
            elif index not in failed:
                self._tiers[place] = self._slots[copy.group][part]
            elif not copy.digest:
                self._tiers[place] = [INVALID] * size
        return BlocksCopied(rank, message.number, sorted(failed))

    def find(self, message: FindBlocks, rank: int = 0) -> BlocksFound:
        """What a tier has of these blocks."""
        digests = [message.digests[start : start + 8] for start in range(0, len(message.digests), 8)]
        groups = range(len(self._specs))
        present = [
            bytes((message.tier, group, digest) in self._tiers for digest in digests) for group in groups
        ]
        return BlocksFound(rank, message.number, present)

    def share_tiers(self, other: "SimulatedWorker") -> None:
        """Have one set of tiers with another worker."""
        self._tiers = other._tiers

    def execute(
        self, batch: ScheduledBatch, failing: Collection[int] = (), late: Collection[int] = ()
    ) -> BatchResult:
        """The rows `failing` fail, and those of `late` that sample are late.

        Raises AssertionError when a row would read KV that is not its own.
        """
        self._step += 1
        assert batch.step == self._step, "a step is missing"
        counts = batch.counts or [1 + batch.num_drafts] * len(batch.rows)
        self._copy_states(batch.state_saves)
        self._copy_states(batch.state_restores)
        self._apply(batch, counts)
        assert len(set(batch.rows)) == len(batch.rows) == len(counts), "rows and counts do not match"
        assert all(0 <= row < self._max_rows for row in batch.rows), "a row is out of range"
        assert 0 < sum(counts) <= self._max_tokens and min(counts) > 0, "the step breaks the token budget"
        for number, count in zip(batch.rows, counts, strict=True):
            row = self._rows[number]
            row.is_late |= number in late and row.computed + count >= row.new.num_known
        work = [
            self._work(self._rows[row], count, batch.num_drafts)
            for row, count in zip(batch.rows, counts, strict=True)
        ]
        self._check_ids(batch, work)
        for row in failing:
            self._rows[row].is_valid = False
        for one in work:
            self._advance_states(one)
        # Each layer writes the KV of all rows before any of them attends.
        for one in work:
            self._write(one)
        self._spread_invalid(work)
        for one in work:
            self._read(one)
        prompt_logprobs = self._prompt_logprobs(batch.rows, counts)
        failed = [self._rows[row] for row in failing]
        sampled = [(one, self._sample(one)) for one in work]
        late_rows = [number for number in batch.rows if self._rows[number].is_late and number not in failing]
        sampled = [
            (one, count) for one, count in sampled if count and one.row not in failed and not one.row.is_late
        ]
        places = [
            (one.row, len(one.row.token_ids) - count + index)
            for one, count in sampled
            for index in range(count)
        ]
        failures = [RowFailure(row, FAILURE) for row in failing]
        return BatchResult(
            batch.step,
            pack_ids(row.token_ids[place] for row, place in places),
            self._sampled_logprobs(places),
            prompt_logprobs,
            failures,
            pack_ids(count for _, count in sampled) if batch.num_drafts else b"",
            pack_ids(one.num_proposed for one, _ in sampled) if batch.num_drafts else b"",
            late_rows,
        )

    def _copy_states(self, copies: Sequence[StateCopy]) -> None:
        targets = {(copy.group, copy.target) for copy in copies}
        assert len(targets) == len(copies), "two states are copied to one slot"
        read = [self._slots[copy.group][copy.source] for copy in copies]
        assert None not in read, "a state is copied that was never written"
        for copy, state in zip(copies, read, strict=True):
            self._slots[copy.group][copy.target] = state

    def _work(self, row: Row, count: int, num_drafts: int) -> Work:
        """A decoding row computes its last token and drafts; the right ones come first among them."""
        start = row.computed
        if not row.decodes:
            return Work(row, count, row.prefixes[start : start + count], count)
        assert count == 1 + num_drafts, "a decoding row has the wrong number of tokens"
        assert start < row.new.max_length + row.last_drafts, "a row runs on beyond its limit"
        row.last_drafts = num_drafts
        num_proposed, num_accepted = self._draft(num_drafts) if num_drafts and not row.is_late else (0, 0)
        assert 0 <= num_accepted <= num_proposed <= num_drafts
        written = [row.prefixes[start]]
        for place in range(num_drafts):
            wrong = place >= num_accepted
            token_id = (sample(written[-1], self._vocabulary) + wrong) % self._vocabulary
            written.append(extend_prefix(written[-1], token_id))
        return Work(row, count, written, 1 + num_accepted, num_proposed)

    def _apply(self, batch: ScheduledBatch, counts: list[int]) -> None:
        new_rows = {new.row: new for new in batch.new_rows}
        ids = list(unpack_ids(batch.token_ids))
        for number, count in zip(batch.rows, counts, strict=True):
            if (new := new_rows.get(number)) is not None:
                token_ids = self._known_ids(new, ids[:count])
                assert len(token_ids) == new.num_known > new.computed, "wrong number of known ids"
                prefixes = prefixes_of(token_ids, new.sampling.seed)
                tables = [list(table) for table in new.block_ids]
                self._rows[number] = Row(list(token_ids), prefixes, new, new.computed, tables)
            row = self._rows[number]
            if row.computed < row.new.num_known:
                del ids[:count]
        for more in batch.more_blocks:
            assert more.row in batch.rows, "blocks for a row that does not run"
            for table, added in zip(self._rows[more.row].tables, more.block_ids, strict=True):
                table.extend(added)

    def _check_ids(self, batch: ScheduledBatch, work: list[Work]) -> None:
        """The batch has the ids of known tokens that it computes, and no others."""
        token_ids, next_ids = [], []
        for one in work:
            row, end = one.row, one.row.computed + one.count
            if not row.decodes:
                assert end <= row.new.num_known, "a row computes an unknown token"
                token_ids += row.token_ids[row.computed : end]
                wanted = row.new.prompt_logprobs >= 0 and end < row.new.prompt_length
                if wanted or (self._sends_next_ids and end < row.new.num_known):
                    next_ids.append(row.token_ids[end])
        assert list(unpack_ids(batch.token_ids)) == token_ids, "wrong ids to compute"
        assert list(unpack_ids(batch.next_ids)) == next_ids, "wrong ids after the chunks"

    def _advance_states(self, one: Work) -> None:
        """A row's first token starts a state; every other one needs the state of the token before."""
        row = one.row
        for group, spec in enumerate(self._specs):
            if isinstance(spec, RecurrentStateSpec):
                (slot,) = row.tables[group]
                before = row.prefixes[row.computed - 1] if row.computed else None
                found = self._slots[group][slot]
                if row.computed and found == INVALID:
                    row.is_valid = False
                valid = not row.is_valid or row.computed == 0 or found == before
                assert valid, f"step {self._step}: another request's state"
                # After drafts the row goes on from the state after the last accepted one.
                self._slots[group][slot] = one.written[one.num_right - 1] if row.is_valid else INVALID

    def _write(self, one: Work) -> None:
        """No KV is written from `max_length` on."""
        row = one.row
        for group, spec in enumerate(self._specs):
            if isinstance(spec, RecurrentStateSpec):
                continue
            for position in range(row.computed, min(row.computed + one.count, row.new.max_length)):
                value = one.prefix(position) if row.is_valid else INVALID
                self._slots[group][self._slot(row, group, position)] = value
            if row.decodes:  # a model that drafts writes to the positions after the step's
                last = min(row.computed + one.count + self._lookahead, row.new.max_length) - 1
                assert last < 0 or len(row.tables[group]) > last // spec.block_size, "no block for drafts"

    def _spread_invalid(self, work: list[Work]) -> None:
        """Rows that read invalid KV write invalid KV, which more rows may read."""
        changed = True
        while changed:
            changed = False
            for one in work:
                if one.row.is_valid and any(found == INVALID for _, found in self._attended(one)):
                    one.row.is_valid, changed = False, True
                    self._write(one)

    def _read(self, one: Work) -> None:
        if one.row.is_valid:
            for position, found in self._attended(one):
                assert found == one.prefix(position), (
                    f"step {self._step}: another request's KV at position {position}"
                )

    def _attended(self, one: Work) -> Iterator[tuple[int, int | None]]:
        """Position and content of every slot that the row's next tokens attend to."""
        row = one.row
        for group, spec in enumerate(self._specs):
            if isinstance(spec, RecurrentStateSpec):
                continue
            first = 0 if isinstance(spec, FullAttentionSpec) else max(0, row.computed - spec.window + 1)
            for position in range(first, one.end):
                yield position, self._slots[group][self._slot(row, group, position)]

    def _slot(self, row: Row, group: int, position: int) -> int:
        spec = self._specs[group]
        assert not isinstance(spec, RecurrentStateSpec)
        size = spec.block_size
        return row.tables[group][position // size] * size + position % size

    def _sample(self, one: Work) -> int:
        """Count the tokens as computed; returns how many tokens the row samples, which it then has."""
        row, count = one.row, one.num_right
        if row.computed + count < row.new.num_known:
            row.computed += count
            return 0
        num_sampled = row.computed + count + 1 - len(row.token_ids)
        for _ in range(num_sampled):
            wrong = not row.is_valid or row.is_late
            token_id = (sample(row.prefixes[-1], self._vocabulary) + wrong) % self._vocabulary
            row.token_ids.append(token_id)
            row.prefixes.append(extend_prefix(row.prefixes[-1], token_id))
        row.computed += count
        return num_sampled

    def _sampled_logprobs(self, places: list[tuple[Row, int]]) -> SampledLogprobs | None:
        """Log probabilities of the tokens at `places`, as wide as the widest that a row wants."""
        wanted = [row.new.sampling.logprobs for row, _ in places]
        indices = [index for index, most_likely in enumerate(wanted) if most_likely >= 0]
        if not indices:
            return None
        width = 1 + max(wanted)
        rows = [self._score(*places[index], width) for index in indices]
        return SampledLogprobs(indices, pack_scores(rows, width))

    def _prompt_logprobs(self, numbers: list[int], counts: list[int]) -> list[PromptLogprobs]:
        """Log probabilities of the tokens after those computed, as far as the prompt goes."""
        chunks = []
        for number, count in zip(numbers, counts, strict=True):
            row = self._rows[number]
            start, end = row.computed + 1, min(row.computed + count + 1, row.new.prompt_length)
            if row.new.prompt_logprobs >= 0 and start < end:
                width = 1 + row.new.prompt_logprobs
                table = pack_scores([self._score(row, at, width) for at in range(start, end)], width)
                chunks.append(PromptLogprobs(number, start, table))
        return chunks

    def _score(self, row: Row, position: int, width: int) -> Scores:
        return scores(row.prefixes[position - 1], row.token_ids[position], width, self._vocabulary)
