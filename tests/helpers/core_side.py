"""The engine core's half of the worker protocol, as plain as it gets: for driving workers."""

import random
from collections.abc import Callable, Sequence

from atom.messages.engine import Sampling, pack_ids, unpack_ids
from atom.messages.worker import KVSpec, MoreBlocks, NewRow, RecurrentStateSpec, ScheduledBatch

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)

Execute = Callable[[ScheduledBatch], bytes]
"""Runs one step on a worker; gives the drawn ids, packed."""


class CoreSide:
    """Rows, their tokens and their blocks. Blocks of each KV group are handed out in random order."""

    def __init__(
        self, num_blocks: int, block_size: int, seed: int = 0, groups: int = 1, states: Sequence[int] = ()
    ):
        """Of the `groups`, those numbered `states` keep one slot a request."""
        self._block_size = block_size
        shuffled = random.Random(seed)
        self._free = [shuffled.sample(range(num_blocks), num_blocks) for _ in range(groups)]
        self._states = states
        self._blocks: dict[int, int] = {}
        self._fresh: dict[int, tuple[Sampling, int, int]] = {}
        self._scored_until: dict[int, int] = {}
        self._drawers: list[int] = []
        self._step = 0
        self.known: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}

    @classmethod
    def of_specs(cls, specs: Sequence[KVSpec], num_blocks: int, block_size: int, seed: int = 0) -> "CoreSide":
        """With so many blocks, or slots, in each group."""
        states = [number for number, spec in enumerate(specs) if isinstance(spec, RecurrentStateSpec)]
        return cls(num_blocks, block_size, seed, len(specs), states)

    def add(
        self,
        row: int,
        ids: Sequence[int],
        sampling: Sampling = GREEDY,
        prompt_logprobs: int = -1,
        generated: int = 0,
    ) -> None:
        """A request takes `row`; its blocks come with the first step that runs it.

        The last `generated` ids are what it had generated before it was preempted.
        """
        self.tokens[row] = list(ids)
        self.known[row], self.computed[row], self._blocks[row] = len(ids), 0, 0
        self._fresh[row] = sampling, len(ids) - generated, prompt_logprobs

    def plan(self, counts: dict[int, int]) -> ScheduledBatch:
        """The step that computes so many tokens of each row."""
        new_rows, more_blocks, ids, next_ids = [], [], [], []
        for row, count in counts.items():
            end = self.computed[row] + count
            needed = -(-end // self._block_size) - self._blocks[row]
            blocks = [
                [free.pop() for _ in range(row in self._fresh if group in self._states else needed)]
                for group, free in enumerate(self._free)
            ]
            self._blocks[row] += needed
            if row in self._fresh:
                new_rows.append(self._new_row(row, blocks))
            elif needed:
                more_blocks.append(MoreBlocks(row, blocks))
            if self.computed[row] < self.known[row]:
                ids += self.tokens[row][self.computed[row] : end]
                if end < self._scored_until[row]:
                    next_ids.append(self.tokens[row][end])
            self.computed[row] = end
        self._drawers = [row for row in counts if self.computed[row] >= self.known[row]]
        self._step += 1
        columns = [] if set(counts.values()) == {1} else list(counts.values())
        packed = pack_ids(ids), pack_ids(next_ids)
        return ScheduledBatch(self._step, list(counts), columns, new_rows, more_blocks, *packed)

    def _new_row(self, row: int, blocks: list[list[int]]) -> NewRow:
        sampling, prompt_length, prompt_logprobs = self._fresh.pop(row)
        self._scored_until[row] = prompt_length if prompt_logprobs >= 0 else 0
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
        )

    def take(self, token_ids: bytes) -> None:
        """The step's drawn ids, in batch order."""
        for row, token in zip(self._drawers, unpack_ids(token_ids), strict=True):
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
    """`count` tokens for each prompt, in pieces of `chunk`; row i joins at step i * stagger.

    With a stagger, prompt pieces run beside the decodes of earlier rows.
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
            core.take(execute(core.plan(counts)))
        step += 1
