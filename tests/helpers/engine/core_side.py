"""A minimal engine core, to run workers: it plans steps and tracks rows, tokens and blocks."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from atom.shared.messages.engine import Sampling, pack_ids, unpack_ids
from atom.shared.messages.worker import (
    MAX_LENGTH,
    BatchResult,
    KVSpec,
    MoreBlocks,
    NewRow,
    RecurrentStateSpec,
    ScheduledBatch,
)

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)

Execute = Callable[[ScheduledBatch], bytes]
"""Runs one step on a worker; returns the sampled ids, packed."""


class CoreSide:
    """Rows, their tokens and their blocks. Blocks of each KV group are allocated in random order."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        seed: int = 0,
        groups: int = 1,
        states: Sequence[int] = (),
        num_drafts: int = 0,
    ):
        """Groups whose numbers are in `states` keep one slot a request.

        With `num_drafts`, every decoding row has that many drafts; `add_result` takes its tokens.
        """
        self.lookahead = 0
        """Positions after its step's for which a row has blocks."""
        self.sends_next_ids = False
        """Whether the id after every prompt chunk is sent."""
        self._block_size = block_size
        self._num_drafts = num_drafts
        self._in_flight: deque[list[tuple[int, int]]] = deque()
        """For each step, its sampling rows and the tokens that each may turn out to have sampled."""
        shuffled = random.Random(seed)
        self._free = [shuffled.sample(range(num_blocks), num_blocks) for _ in range(groups)]
        self._states = states
        self._blocks: dict[int, int] = {}
        self._more: dict[int, dict[str, Any]] = {}
        self._limits: dict[int, int] = {}
        self._owned: dict[int, list[list[int]]] = {}
        self._fresh: dict[int, tuple[Sampling, int, int]] = {}
        self._logprobs_until: dict[int, int] = {}
        self._sampling_rows: list[int] = []
        self._step = 0
        self.known: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}

    @classmethod
    def of_specs(cls, specs: Sequence[KVSpec], num_blocks: int, block_size: int, seed: int = 0) -> "CoreSide":
        """With `num_blocks` blocks, or slots, in each group."""
        states = [number for number, spec in enumerate(specs) if isinstance(spec, RecurrentStateSpec)]
        return cls(num_blocks, block_size, seed, len(specs), states)

    def add(
        self,
        row: int,
        ids: Sequence[int],
        sampling: Sampling = GREEDY,
        prompt_logprobs: int = -1,
        generated: int = 0,
        **more: Any,
    ) -> None:
        """Assign `row` to a request; its blocks are allocated with its first step.

        The last `generated` ids are what it had generated before it was preempted. `more` are other
        fields of `NewRow`.
        """
        self._more[row], self._limits[row] = more, more.get("max_length", MAX_LENGTH)
        self.tokens[row] = list(ids)
        self.known[row], self.computed[row], self._blocks[row] = len(ids), 0, 0
        self._fresh[row] = sampling, len(ids) - generated, prompt_logprobs

    def free(self, row: int) -> None:
        """Free the blocks of a row, if it has any."""
        for group, blocks in zip(self._free, self._owned.pop(row, []), strict=False):
            group += blocks

    def plan(self, counts: dict[int, int]) -> ScheduledBatch:
        """The step that computes `counts[row]` tokens of each row."""
        new_rows, more_blocks, ids, next_ids = [], [], [], []
        decodes = {row for row in counts if self.computed[row] >= self.known[row]}
        counts = {row: count + (row in decodes) * self._num_drafts for row, count in counts.items()}
        for row, count in counts.items():
            end = self.computed[row] + count
            reserved = -(-min(end + self.lookahead, self._limits[row]) // self._block_size)
            needed = max(reserved - self._blocks[row], 0)
            blocks = [
                [free.pop() for _ in range(row in self._fresh if group in self._states else needed)]
                for group, free in enumerate(self._free)
            ]
            self._blocks[row] += needed
            owned = self._owned.setdefault(row, [[] for _ in blocks])
            for had, added in zip(owned, blocks, strict=True):
                had += added
            if row in self._fresh:
                new_rows.append(self._new_row(row, blocks))
            elif needed:
                more_blocks.append(MoreBlocks(row, blocks))
            if row not in decodes:
                ids += self.tokens[row][self.computed[row] : end]
                if end < (self.known[row] if self.sends_next_ids else self._logprobs_until[row]):
                    next_ids.append(self.tokens[row][end])
            self.computed[row] = end
        self._sampling_rows = [row for row in counts if self.computed[row] >= self.known[row]]
        self._in_flight.append([(row, counts[row] if row in decodes else 1) for row in self._sampling_rows])
        self._step += 1
        columns = [] if decodes == counts.keys() or set(counts.values()) == {1} else list(counts.values())
        packed = pack_ids(ids), pack_ids(next_ids)
        drafts = self._num_drafts
        return ScheduledBatch(self._step, list(counts), columns, new_rows, more_blocks, *packed, drafts)

    def _new_row(self, row: int, blocks: list[list[int]]) -> NewRow:
        sampling, prompt_length, prompt_logprobs = self._fresh.pop(row)
        self._logprobs_until[row] = prompt_length if prompt_logprobs >= 0 else 0
        processors, tokens = sampling.logits_processors, self.tokens[row]
        prompt, output = tokens[:prompt_length], tokens[prompt_length:]
        return NewRow(
            row,
            self.known[row],
            self.computed[row],
            blocks,
            sampling,
            prompt_length,
            prompt_logprobs,
            pack_ids(set(prompt)) if processors and processors.needs_prompt_ids else b"",
            pack_ids(output) if processors and processors.needs_output_ids else b"",
            **self._more.pop(row, {}),
        )

    def add_result(self, result: BatchResult) -> None:
        """Append the sampled ids of the oldest step without result; rejected drafts are not computed."""
        rows, ids = self._in_flight.popleft(), list(unpack_ids(result.token_ids))
        counts = unpack_ids(result.counts) if result.counts else [1] * len(rows)
        for (row, most), count in zip(rows, counts, strict=True):
            self.tokens[row] += ids[:count]
            self.computed[row] -= most - count
            del ids[:count]
        assert not ids

    def add_sampled(self, token_ids: bytes) -> None:
        """Append the step's sampled ids, in batch order."""
        for row, token in zip(self._sampling_rows, unpack_ids(token_ids), strict=True):
            self.tokens[row].append(token)

    def generated(self, row: int) -> list[int]:
        return self.tokens[row][self.known[row] :]


def generate(
    core: CoreSide,
    execute: Execute,
    prompts: Sequence[Sequence[int]],
    count: int,
    chunk: int,
    stagger: int = 0,
    sampling: Sampling = GREEDY,
) -> list[list[int]]:
    """`count` tokens for each prompt, in chunks of `chunk`; row i joins at step i * stagger.

    With a stagger, prompt chunks run in the same steps as the decodes of earlier rows.
    """
    step = 0
    while True:
        for row, prompt in enumerate(prompts):
            if row not in core.tokens and step >= row * stagger:
                core.add(row, prompt, sampling)
        counts = {
            row: min(chunk, max(core.known[row] - core.computed[row], 1))
            for row in core.tokens
            if len(core.generated(row)) < count
        }
        if not counts and len(core.tokens) == len(prompts):
            return [core.generated(row) for row in range(len(prompts))]
        if counts:
            core.add_sampled(execute(core.plan(counts)))
        step += 1
