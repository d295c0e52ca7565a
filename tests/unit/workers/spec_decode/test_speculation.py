"""Steps with drafts: the tokens of steps without, computed in fewer steps, in every way to launch them."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from atom.shared.messages.engine import LogitsProcessors, Sampling, pack_ids, unpack_ids
from atom.shared.messages.worker import ScheduledBatch
from atom_ops import NgramRule, StatePlan
from tests.helpers.engine.core_side import GREEDY, CoreSide
from tests.unit.workers.graphs.test_decode_graphs import Rerun
from workers.batch.block_table import BatchLimits, BlockTable
from workers.batch.input_batch import InputBatch
from workers.graphs.decode_graphs import DecodeGraphs
from workers.graphs.prompt_graphs import PromptGraphs
from workers.layers.causal_lm import CausalLM
from workers.layers.context import ForwardContext
from workers.memory.memory_guard import MemoryGuard
from workers.model_runner import Graphs, ModelRunner
from workers.sampling.sampler import Sampler
from workers.spec_decode.draft_rows import DraftRows
from workers.spec_decode.ngram import NgramProposer
from workers.spec_decode.proposer import Proposer
from workers.spec_decode.text_history import TextGroup

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
BLOCK, BLOCKS, LENGTH, ROWS, VOCAB = 4, 120, 60, 6, 11


class TwoTokensBack:
    """A fake model: the next token follows from the last two, which it reads from its cache of ids.

    A token that is written to a wrong slot, or a context that ends elsewhere, changes the output.
    """

    def __init__(self) -> None:
        self._cache = torch.zeros(BLOCKS * BLOCK + 1, dtype=torch.int64)
        generator = torch.Generator().manual_seed(2)
        self._next = torch.randint(0, VOCAB, (VOCAB, VOCAB), generator=generator)

    def __call__(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        for group in ctx.groups:
            assert not isinstance(group, StatePlan)
            self._cache[group.slots_T] = ids_T
        plan = group.plan
        lengths = plan.query_starts_R1.diff()
        rows_T = torch.arange(len(lengths)).repeat_interleave(lengths)
        rows_T = torch.cat((rows_T, rows_T.new_zeros(len(ids_T) - len(rows_T))))
        tokens = torch.arange(len(ids_T))
        seen_T = plan.context_lens_R[rows_T] - plan.query_starts_R1[rows_T + 1] + tokens + 1
        table_RW = torch.nn.functional.pad(plan.block_table_RW, (0, 1))  # a step of no tokens has no entry
        last_two = []
        for back in (1, 2):
            at_T = (seen_T - back).clamp(min=0, max=table_RW.shape[1] * BLOCK - 1).long()
            block_T = table_RW[rows_T, at_T // BLOCK].long()
            last_two.append(self._cache[block_T * BLOCK + at_T % BLOCK])
        return self._next[last_two[0], last_two[1]][:, None].float()

    sample = CausalLM.sample

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden_SD[:, 0].long() % VOCAB, VOCAB).float() * 6


MakeProposer = Callable[[BatchLimits, list[BlockTable], bool], Proposer]


def looks_up(limits: BatchLimits, tables: list[BlockTable], exact: bool) -> Proposer:
    return NgramProposer(NgramRule(3, 2), TextGroup(0, 0), tables[0], BLOCKS, limits, CPU)


def runner(
    num_drafts: int,
    exact: bool = False,
    sizes: list[int] | None = None,
    captured: Sequence[int] = (),
    proposes: MakeProposer = looks_up,
    adaptive: bool = False,
    forced_length: float | None = None,
) -> ModelRunner:
    """`captured`: the drafts of each row in decode graphs; empty: `num_drafts`."""
    model = cast(CausalLM, TwoTokensBack())
    limits = BatchLimits(ROWS, LENGTH, BLOCK, num_drafts)
    tables = [BlockTable(limits), BlockTable(limits)]
    proposer = proposes(limits, tables, exact) if num_drafts else None
    inputs = InputBatch(
        limits,
        tables,
        CPU,
        proposer=proposer,
        exact=exact,
        adaptive=adaptive,
        forced_length=forced_length,
    )
    memory = MemoryGuard(CPU, num_ranks=1)
    sampler = Sampler(limits, VOCAB, CPU, memory)
    graphs = None
    if sizes is not None:
        decode = [
            DecodeGraphs(model, [], inputs, sizes, Rerun(), CPU, drafts)
            for drafts in captured or [num_drafts]
        ]
        prompts = PromptGraphs(model, [], inputs, [3, 8, 40], Rerun(), CPU)
        for graphs_of_kind in (prompts, *decode):
            graphs_of_kind.capture(lambda: None)
        graphs = Graphs(decode, prompts)
    return ModelRunner(model, [], inputs, sampler, memory, lambda: None, graphs)


class SameBlocks(CoreSide):
    """Both groups have the same blocks."""

    def plan(self, counts: dict[int, int]) -> ScheduledBatch:
        batch = super().plan(counts)
        for change in (*batch.new_rows, *batch.more_blocks):
            change.block_ids.append(change.block_ids[0])
        return batch


def sampled(seed: int, **fields: Any) -> Sampling:
    settings = {"temperature": 0.8, "top_k": 0, "top_p": 0.9, "min_p": 0.0, "seed": seed, **fields}
    return Sampling(**settings)


def settings() -> list[Sampling]:
    processors = [
        LogitsProcessors(frequency_penalty=0.7, bad_words=[[2, 3], [1]]),
        LogitsProcessors(repetition_penalty=1.4, presence_penalty=0.3),
        LogitsProcessors(min_tokens=9, end_ids=[3]),
        LogitsProcessors(bias_ids=pack_ids([4, 5]), bias_values=[2.0, -3.0]),
    ]
    return [
        GREEDY,
        sampled(1),
        sampled(2, logprobs=2),
        *[sampled(3 + i, logits_processors=each) for i, each in enumerate(processors)],
        sampled(9, temperature=0.0, logits_processors=processors[0], logprobs=1),
    ]


class Driver:
    """Requests of every setting that join one after another, on a few rows; `in_flight` steps at a time."""

    def __init__(self, made: ModelRunner, num_drafts: int, in_flight: int, requests: int = 24):
        self.core = SameBlocks(BLOCKS, BLOCK, num_drafts=num_drafts, groups=1)
        self.num_accepted = self.num_proposed = 0
        self.outputs: list[list[int]] = [[] for _ in range(requests)]
        self.steps = 0
        self._made, self._in_flight, self._num_drafts = made, in_flight, num_drafts
        self._pending: deque[tuple[Any, dict[int, int]]] = deque()
        self._owner: dict[int, int] = {}
        self._planned: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self.turns: random.Random | None = None
        """Chooses the steps that have drafts; None: all have."""

    def run(self) -> list[list[int]]:
        source, waiting = random.Random(5), deque(range(len(self.outputs)))
        while True:
            ended = [row for row, owner in self._owner.items() if self._has_ended(row, owner)]
            for row in ended:
                del self._owner[row]
            for row in range(ROWS):
                if row not in self._owner and waiting and not self._is_in_flight(row):
                    self._add(row, waiting.popleft(), source)
            counts = {row: self._next(row) for row in self._owner if self._may_step(row)}
            if counts and len(self._pending) < self._in_flight:
                if self.turns is not None:
                    self.core._num_drafts = self._num_drafts * self.turns.randrange(2)
                for row in counts:
                    self._planned[row] += self.core.computed[row] + counts[row] >= self.core.known[row]
                step = self._made.launch(self.core.plan(counts))
                self._pending.append((step, {row: self._owner[row] for row in self.core._sampling_rows}))
                self.steps += 1
            elif self._pending:
                self._deliver()
            else:
                return self.outputs

    def _add(self, row: int, owner: int, source: random.Random) -> None:
        prompt = [source.randrange(VOCAB) for _ in range(source.randrange(1, 20))]
        self._counts[owner] = source.randrange(1, LENGTH - len(prompt) + 1)
        self._owner[row], self._planned[row] = owner, 0
        choices = settings()
        more = {"max_length": len(prompt) + self._counts[owner]}
        self.core.free(row)
        self.core.add(row, prompt, choices[owner % len(choices)], **more)

    def _next(self, row: int) -> int:
        return max(1, min(7, self.core.known[row] - self.core.computed[row]))

    def _may_step(self, row: int) -> bool:
        """Whether the step makes a token for certain: each one in flight makes one at least."""
        before = len(self.outputs[self._owner[row]]) + self._samples_in_flight(row)
        return before < self._counts[self._owner[row]]

    def _samples_in_flight(self, row: int) -> int:
        return sum(owners.get(row) == self._owner[row] for _, owners in self._pending)

    def _is_in_flight(self, row: int) -> bool:
        return any(row in owners for _, owners in self._pending)

    def _has_ended(self, row: int, owner: int) -> bool:
        return len(self.outputs[owner]) >= self._counts[owner]

    def _deliver(self) -> None:
        step, owners = self._pending.popleft()
        before = {row: len(self.core.tokens[row]) for row in owners}
        result = step.result()
        self.num_proposed += sum(unpack_ids(result.num_proposed))
        self.num_accepted += sum(count - 1 for count in unpack_ids(result.counts))
        self.core.add_result(result)
        for row, owner in owners.items():
            output = self.outputs[owner]
            output += self.core.tokens[row][before[row] :]
            del output[self._counts[owner] :]


@pytest.fixture(scope="module")
def plain() -> Driver:
    made = Driver(runner(0), 0, 1)
    made.run()
    return made


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("num_drafts", [pytest.param(1, marks=pytest.mark.slow), 3, 6])
@pytest.mark.parametrize("way", ["exact", "upper bounds", "graphs", "some graphs"])
def test_drafts_change_no_token(plain: Driver, way: str, num_drafts: int, in_flight: int) -> None:
    sizes = {"graphs": [1, 2, 4, 6], "some graphs": [3]}.get(way)
    driver = Driver(runner(num_drafts, way == "exact", sizes), num_drafts, in_flight)
    assert driver.run() == plain.outputs
    assert driver.steps < 0.95 * plain.steps


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("way", ["exact", "exact, recorded", "upper bounds", "graphs"])
def test_steps_with_and_without_drafts_take_turns(plain: Driver, way: str, in_flight: int) -> None:
    """On a CPU steps without drafts are recorded, on a GPU both kinds are captured."""
    captured = [0] if way.startswith("exact") else [3, 0]
    sizes = None if way in ("exact", "upper bounds") else [1, 2, 4, 6]
    driver = Driver(runner(3, way.startswith("exact"), sizes, captured), 3, in_flight)
    driver.turns = random.Random(3)
    assert driver.run() == plain.outputs
    assert driver.steps < 0.98 * plain.steps


def test_drafts_after_a_missing_one_are_not_computed() -> None:
    limits = BatchLimits(2, 40, BLOCK, 3)
    table = BlockTable(limits)
    proposer = NgramProposer(NgramRule(2, 2), TextGroup(0, 0), table, 8, limits, CPU)
    made = InputBatch(limits, [table], CPU, proposer=proposer).speculation
    assert made is not None
    made._limits[:] = 40
    made.state.positions_N[:2] = 5
    made.state.ids_N[:2] = 9
    made.state.drafts_NK[:2] = torch.tensor([[1, -1, 2], [3, 4, 5]])
    _, counts, ids = made.exact_work(np.array([0, 1]), 3)
    assert counts.tolist() == [2, 4]
    assert ids.tolist() == [9, 1, 9, 3, 4, 5]


class Markov:
    """A fake model: a token's distribution follows from the token before it."""

    def __init__(self) -> None:
        self.logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(4))

    def __call__(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return ids_T[:, None].float()

    sample = CausalLM.sample

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        return self.logits[hidden_SD[:, 0].long()]


def triples_of(
    proposes: Callable[[BatchLimits, BlockTable], Proposer],
    exact: bool = True,
    lookahead: int = 0,
    sends_next_ids: bool = False,
) -> int:
    """Triples of tokens after a prompt, 20,000 of them, by a chi-square test; returns the accepted drafts."""
    rows, total, prompt = 500, 20_000, [0, 3, 2, 4, 0, 3]
    model, limits = Markov(), BatchLimits(rows, 12, BLOCK, 3)
    table = BlockTable(limits)
    inputs = InputBatch(limits, [table], CPU, proposer=proposes(limits, table), exact=exact)
    memory = MemoryGuard(CPU, num_ranks=1)
    made = ModelRunner(
        cast(CausalLM, model), [], inputs, Sampler(limits, 5, CPU, memory), memory, lambda: None
    )
    found, accepted = torch.zeros(5, 5, 5), 0
    for first in range(0, total, rows):
        core = CoreSide(3 * rows, BLOCK, num_drafts=3)
        core.lookahead, core.sends_next_ids = lookahead, sends_next_ids
        for row in range(rows):
            settings = sampled(first + row, temperature=1.0, top_p=1.0)
            core.add(row, prompt, settings, max_length=len(prompt) + 3)
        counts = dict.fromkeys(range(rows), len(prompt))
        while counts:
            result = made.launch(core.plan(counts)).result()
            accepted += sum(count - 1 for count in unpack_ids(result.counts))
            core.add_result(result)
            counts = {row: 1 for row in range(rows) if len(core.generated(row)) < 3}
        for row in range(rows):
            found[tuple(core.generated(row)[:3])] += 1
    chances = model.logits.softmax(-1)
    expected = total * chances[3][:, None, None] * chances[:, :, None] * chances[None]
    enough = expected >= 5
    statistic = ((found - expected) ** 2 / expected)[enough].sum().item()
    freedom = int(enough.sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
    return accepted


def test_the_distribution_is_the_models() -> None:
    """The drafts that the prompt has for them are 2 4 0."""
    accepted = triples_of(
        lambda limits, table: NgramProposer(
            NgramRule(2, 2), TextGroup(0, 0), table, 3 * limits.max_rows, limits, CPU
        )
    )
    assert accepted > 100


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_sampled_tokens_are_in_memory_one_after_another(rows: int) -> None:
    """Also those of one row: an expanded view of it has a stride of 0."""
    width = 4
    indices = np.arange(rows).repeat(width)
    rows_R = torch.arange(rows)
    drafts = DraftRows(
        *(np.arange(rows), np.ones(rows, np.bool_), rows_R, rows_R, torch.zeros(rows, width - 1)),
        *(indices, np.tile(np.arange(width), rows), None),
    )
    assert drafts.indices_S.is_contiguous() and drafts.indices_S.tolist() == indices.tolist()
