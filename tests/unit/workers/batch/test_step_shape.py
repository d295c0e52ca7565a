"""Shapes of steps: planned from the batch, agreed with other ranks, padded, and launched without requests."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom.shared.messages.worker import ScheduledBatch
from atom_ops import (
    KVLayer,
    LatentLayer,
    StateLayer,
    StatePlan,
    StateShape,
    make_kv_layer,
    make_state_layer,
    write_kv,
)
from tests.helpers.checkpoints.rows import model_rows
from tests.helpers.checkpoints.tiny_models import prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import generate
from tests.helpers.engine.heads_first import Cache
from tests.helpers.engine.teacher_forcing import TinyWorker
from tests.unit.workers.graphs.test_decode_graphs import CPU, LIMITS, Footprint, TwoGroups, runner
from tests.unit.workers.spec_decode.test_speculation import Driver
from tests.unit.workers.spec_decode.test_speculation import runner as speculative_runner
from workers.batch.step_shape import GraphSizes, StepMode, StepShape
from workers.graphs import prompt_graphs
from workers.layers.context import ForwardContext, GroupContext
from workers.model_runner import ModelRunner
from workers.pending_step import PendingStep

DECODE, PROMPT, EAGER = StepMode
SIZES = GraphSizes(decode_rows=[1, 2, 4, 8], prompt_tokens=[16, 32, 64], prompt_rows=[4, 12])


@pytest.mark.parametrize(
    ("tokens", "rows", "per_row", "shape"),
    [
        (1, 1, 1, StepShape(DECODE, 1, 1, 1)),
        (5, 5, 1, StepShape(DECODE, 8, 8, 1)),
        (9, 9, 1, StepShape(PROMPT, 16, 12)),
        (5, 5, 0, StepShape(PROMPT, 16, 12)),
        (33, 4, 0, StepShape(PROMPT, 64, 4)),
        (65, 1, 0, StepShape(EAGER, 65, 1)),
        (13, 13, 1, StepShape(EAGER, 13, 13)),
    ],
)
def test_the_smallest_captured_shape_is_planned(
    tokens: int, rows: int, per_row: int, shape: StepShape
) -> None:
    assert SIZES.plan(tokens, rows, per_row) == shape


def test_without_graphs_every_step_is_eager_and_not_padded() -> None:
    assert GraphSizes().plan(3, 3, 1) == StepShape(EAGER, 3, 3)


@pytest.mark.parametrize(
    ("planned", "shape"),
    [
        ([(3, 3, 1), (8, 8, 1)], StepShape(DECODE, 8, 8, 1)),
        ([(3, 3, 1), (20, 2, 0)], StepShape(PROMPT, 32, 4)),
        ([(8, 8, 1), (20, 2, 0)], StepShape(PROMPT, 32, 12)),
        ([(1, 1, 1), (70, 2, 0)], StepShape(EAGER, 70, 2)),
        ([(2, 2, 1), (70, 1, 0), (20, 12, 0)], StepShape(EAGER, 70, 12)),
    ],
)
def test_one_shape_covers_all_ranks(planned: list[tuple[int, int, int]], shape: StepShape) -> None:
    shapes = [SIZES.plan(*arguments) for arguments in planned]
    assert SIZES.covering(shapes) == SIZES.covering(reversed(shapes)) == shape
    for own in shapes:
        shape.require(own)


_ROWS, _TOKENS = 12, 80


@st.composite
def graphs_and_plans(draw: st.DrawFn) -> tuple[GraphSizes, list[tuple[int, int, int]]]:
    """Sizes of graphs, which may be missing, and the arguments of `plan` on several ranks."""
    rows, tokens, few = (
        sorted(draw(st.sets(st.integers(1, most), max_size=5))) for most in (_ROWS, _TOKENS, _ROWS)
    )
    sizes = GraphSizes(rows, tokens, few, sorted(draw(st.sets(st.integers(1, 5), min_size=1, max_size=2))))
    plans = []
    for _ in range(draw(st.integers(1, 4))):
        number, per_row = (
            draw(st.integers(1, _ROWS + 2)),
            draw(st.sampled_from([0, 1, 2, *sizes.widths])),
        )
        plans.append((number * per_row or number + draw(st.integers(0, _TOKENS)), number, per_row))
    return sizes, plans


@given(graphs_and_plans())
def test_the_agreed_shape_covers_every_plan_and_is_captured_or_eager(
    drawn: tuple[GraphSizes, list[tuple[int, int, int]]],
) -> None:
    sizes, arguments = drawn
    planned = [sizes.plan(*each) for each in arguments]
    for (tokens, rows, _), shape in zip(arguments, planned, strict=True):
        sizes.check(shape)
        assert shape.padded_tokens >= tokens and shape.padded_rows >= rows
        assert sizes.covering([shape]) == shape, "one rank agrees with itself"
    agreed = sizes.covering(planned)
    sizes.check(agreed)
    for shape in planned:
        agreed.require(shape)
    assert sizes.covering([agreed, *planned]) == agreed == sizes.covering(reversed(planned))


class Agreement:
    """Records the planned shapes, and answers as if another rank had planned `other`."""

    def __init__(self, sizes: GraphSizes, other: StepShape | None = None):
        self.sizes = sizes
        self.other = other
        self.planned: list[StepShape] = []

    def __call__(self, shape: StepShape) -> StepShape:
        self.planned.append(shape)
        return shape if self.other is None else self.sizes.covering([shape, self.other])


def agreeing(sizes: list[int] | None, other: StepShape | None = None) -> tuple[ModelRunner, Agreement]:
    made = runner(sizes)
    made._coordinate = agreement = Agreement(made._sizes, other)
    return made, agreement


OTHERS = [
    StepShape(DECODE, 4, 4, 1),
    StepShape(DECODE, 6, 6, 1),
    StepShape(PROMPT, 3, 2),
    StepShape(PROMPT, 20, 6),
    StepShape(EAGER, 40, 9),
    StepShape(EAGER, 1, 1),
]


def random_steps(core: TwoGroups, seed: int) -> list[dict[int, int]]:
    """Counts of steps in which three rows prefill in chunks and decode, alone and mixed."""
    source = random.Random(seed)
    for row in range(3):
        core.add(row, [source.randrange(90) for _ in range(7 + row)])
    return [{0: 7}, {0: 1, 1: 5}, {1: 3, 2: 9}, *[{0: 1, 1: 1, 2: 1}] * 4, {2: 1}, {2: 1, 0: 1}]


def launched(made: ModelRunner, between: StepShape | None = None) -> list[bytes]:
    core = TwoGroups(300, LIMITS.block_size)
    found = []
    for counts in random_steps(core, 3):
        found.append(made.launch(core.plan(counts)).result().token_ids)
        core.add_sampled(found[-1])
        if between is not None:
            made.dummy_step(between)
    return found


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_larger_agreed_shape_pads_the_step(other: StepShape) -> None:
    plain, _ = agreeing([1, 2, 4, 6])
    padded, agreement = agreeing([1, 2, 4, 6], other)
    assert launched(padded) == launched(plain)
    assert {shape.mode for shape in agreement.planned} == {DECODE, PROMPT}


@pytest.fixture(autouse=True)
def two_sizes_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graphs, "_ROW_SIZES", (2, 4))


@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_dummy_steps_between_steps_change_no_token(shape: StepShape) -> None:
    plain, _ = agreeing([1, 2, 4, 6])
    lockstep, agreement = agreeing([1, 2, 4, 6])
    assert launched(lockstep, between=shape) == launched(plain)
    assert len(agreement.planned) == 9, "dummy steps were agreed on before"
    assert lockstep._inputs.device_rows.positions_N[LIMITS.padding_row] == -1


def test_a_shape_that_is_too_small_is_an_error() -> None:
    made, _ = agreeing([1, 2, 4, 6])
    core = TwoGroups(300, LIMITS.block_size)
    core.add(0, [1, 2, 3])
    made._coordinate = lambda shape: StepShape(DECODE, 1, 1, 1)
    with pytest.raises(ValueError, match="too small"):
        made.launch(core.plan({0: 3}))
    with pytest.raises(ValueError, match="at least one token"):
        made.dummy_step(StepShape(EAGER, 0, 1))
    for shape in (StepShape(DECODE, 3, 3, 1), StepShape(DECODE, 4, 4, 2), StepShape(PROMPT, 4, 6)):
        with pytest.raises(ValueError, match=r"no graph .* --cudagraph-capture-sizes"):
            made.dummy_step(shape)


def test_ranks_plan_the_same_shape_from_the_same_message() -> None:
    """Each decodes the message for itself; their sampled ids are on the device and decide nothing."""
    runners = [agreeing([1, 2, 4, 6]) for _ in range(2)]
    core = TwoGroups(300, LIMITS.block_size)
    for counts in random_steps(core, 5):
        batch = core.plan(counts)
        ids = [made.launch(batch).result().token_ids for made, _ in runners]
        core.add_sampled(ids[0])
    first, second = (agreement.planned for _, agreement in runners)
    assert first == second and len(set(first)) >= 4


class Writing(Footprint):
    """Also writes keys, values and states of every token and row."""

    def __call__(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        footprint_T1 = super().__call__(ids_T, positions_T, ctx)
        for cache, group in zip(ctx.kv_layers, ctx.groups, strict=True):
            if isinstance(cache, StateLayer):
                assert isinstance(group, StatePlan)
                rows = torch.arange(len(group.slots_R))
                group.write(cache.conv, rows, group.read(cache.conv, rows) + 1)
            else:
                assert isinstance(cache, KVLayer) and isinstance(group, GroupContext)
                heads_TKE = footprint_T1[:, :, None].expand(-1, 1, 2)
                write_kv(heads_TKE, heads_TKE + 1, cache, group.slots_T)
        return footprint_T1


@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_dummy_steps_write_nothing(shape: StepShape) -> None:
    states = StateShape(channels=3, taps=2, heads=1, key_features=2, value_features=2, dtype=torch.float32)
    keys, values = (make_kv_layer(300, LIMITS.block_size, 1, 2, torch.float32, CPU) for _ in range(2))
    recurrent = make_state_layer(200, states, CPU)
    made = runner([1, 2, 4, 6], Writing(), [keys, recurrent, values])
    launched(made)
    before = state_of(made)
    assert keys.kv.any() and recurrent.conv.any() and values.kv.any()
    made.dummy_step(shape)
    assert all(map(torch.equal, before, state_of(made)))


def state_of(made: ModelRunner) -> list[torch.Tensor]:
    """Copies of all that a step may write: KV caches, recurrent states, last ids of the rows."""
    written = [made._inputs.device_rows.ids_N, made._inputs.device_rows.positions_N]
    for layer in made._kv_layers:
        if isinstance(layer, StateLayer):
            written += [layer.conv, layer.recurrent]
        elif isinstance(layer, KVLayer):
            written.append(layer.kv)
        elif isinstance(layer, LatentLayer):
            written += [layer.rows, *([layer.index.keys] if layer.index else [])]
        elif isinstance(layer, torch.Tensor):
            written.append(layer)
        else:
            assert isinstance(layer, Cache)
            written += [layer.keys[:, :-1], layer.values[:, :-1]]
    return [tensor.clone() for tensor in written]


@pytest.mark.parametrize("name", model_rows())
def test_eager_padding_and_dummy_steps_of_every_family(name: str, tmp_path: Path) -> None:
    """They write nothing, and later steps sample the same tokens; step by step with prompts and decodes."""
    save_tiny(tiny(name), tmp_path)
    worker = TinyWorker(tmp_path)
    made = worker.worker._runner
    prompts = [prompt_of(length, length) for length in (64, 5, 37)]
    plain = generate(worker.core(), worker.execute, prompts, 12, chunk=24, stagger=2)

    def execute(batch: ScheduledBatch) -> bytes:
        ids = worker.execute(batch)
        before = state_of(made)
        for shape in (StepShape(EAGER, 1, 1), StepShape(EAGER, 21, 4)):
            made.dummy_step(shape)
        assert all(map(torch.equal, before, state_of(made)))
        return ids

    assert generate(worker.core(), execute, prompts, 12, chunk=24, stagger=2) == plain
    made._coordinate = Agreement(made._sizes, StepShape(EAGER, 90, 7))
    padded = generate(worker.core(), worker.execute, prompts, 12, chunk=24, stagger=2)
    assert padded == plain


def test_dummy_and_padded_steps_with_drafts() -> None:
    """Between steps that verify three drafts a row, two steps in flight."""
    outputs = Driver(speculative_runner(3, sizes=[1, 6]), 3, 2).run()
    for other in (StepShape(DECODE, 24, 6, 4), StepShape(PROMPT, 40, 6), StepShape(EAGER, 50, 8)):
        made = speculative_runner(3, sizes=[1, 6])
        made._coordinate = Agreement(made._sizes, other)
        launch = made.launch

        def with_dummy(
            batch: ScheduledBatch,
            made: ModelRunner = made,
            other: StepShape = other,
            launch: Callable[[ScheduledBatch], PendingStep] = launch,
        ) -> PendingStep:
            made.dummy_step(other)
            return launch(batch)

        made.launch = with_dummy  # type: ignore[method-assign]
        assert Driver(made, 3, 2).run() == outputs
