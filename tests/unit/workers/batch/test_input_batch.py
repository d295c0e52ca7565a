"""The persistent batch: what a step's arrays hold, and what it costs to make them."""

import msgspec
import numpy as np
import pytest
import torch

from atom.shared.messages.engine import pack_ids
from atom.shared.messages.worker import MoreBlocks, NewRow, ScheduledBatch
from tests.helpers.engine.core_side import GREEDY
from workers.batch.block_table import BatchLimits, BlockTable
from workers.batch.input_batch import InputBatch
from workers.batch.step_inputs import StepInputs
from workers.layers.context import ForwardContext
from workers.spec_decode.draft_rows import Computed, Draws

BLOCK = 4
CPU = torch.device("cpu")


def make(groups: int = 1, max_rows: int = 8, max_model_len: int = 64) -> InputBatch:
    limits = BatchLimits(max_rows, max_model_len, BLOCK)
    return InputBatch(limits, [BlockTable(limits) for _ in range(groups)], CPU)


def new_row(row: int, ids: list[int], *blocks: list[int], computed: int = 0) -> NewRow:
    return NewRow(row, len(ids), computed, list(blocks), GREEDY, len(ids))


def apply(batch: InputBatch, message: ScheduledBatch, *ids: int) -> StepInputs:
    """The step's inputs; it computes `ids` in addition to what it decodes."""
    message = msgspec.structs.replace(message, token_ids=pack_ids(ids))
    return batch.step(batch.apply(message))


def store_sampled(batch: InputBatch, step: StepInputs, *ids: int) -> None:
    assert step.sampling is not None
    hidden_TD = torch.empty(len(step.ids_T), 0)
    computed = Computed(step.ids_T, step.positions_T, hidden_TD, ForwardContext([], step.groups))
    batch.store_sampled(step.sampling, Draws(computed, torch.tensor(ids), step.sampling.tokens_R, None))


def test_chunks_of_a_prompt() -> None:
    batch = make()
    first = apply(batch, ScheduledBatch(1, [2], [3], [new_row(2, [10, 11, 12, 13, 14], [7, 5])]), 10, 11, 12)
    assert first.ids_T.tolist() == [10, 11, 12] and first.positions_T.tolist() == [0, 1, 2]
    assert first.groups[0].slots_T.tolist() == [28, 29, 30]
    assert first.sampling is None
    second = apply(batch, ScheduledBatch(2, [2], [2]), 13, 14)
    assert second.ids_T.tolist() == [13, 14] and second.groups[0].slots_T.tolist() == [31, 20]
    assert second.sampling is not None
    assert second.sampling.tokens_R.tolist() == [1] and second.sampling.positions_R.tolist() == [5]


def test_the_input_of_a_decode_is_the_id_that_its_row_sampled_last() -> None:
    batch = make()
    rows = [new_row(0, [1, 2], [0]), new_row(5, [3], [1])]
    step = apply(batch, ScheduledBatch(1, [5, 0], [1, 2], rows), 3, 1, 2)
    assert step.ids_T.tolist() == [3, 1, 2]
    store_sampled(batch, step, 50, 60)
    for position in (0, 1, 2):
        step = apply(batch, ScheduledBatch(2 + position, [5, 0]))
        assert step.ids_T.tolist() == [50 + position, 60 + position]
        assert step.positions_T.tolist() == [1 + position, 2 + position]
        assert step.sampling is not None
        assert step.sampling.positions_R.tolist() == [2 + position, 3 + position]
        if position < 2:
            store_sampled(batch, step, 51 + position, 61 + position)


def test_prompt_chunks_and_decodes_in_one_step() -> None:
    batch = make()
    store_sampled(batch, apply(batch, ScheduledBatch(1, [0], [2], [new_row(0, [1, 2], [0])]), 1, 2), 90)
    step = apply(batch, ScheduledBatch(2, [3, 0], [3, 1], [new_row(3, [4, 5, 6, 7], [8])]), 4, 5, 6)
    assert step.ids_T.tolist() == [4, 5, 6, 90]
    assert step.sampling is not None
    assert step.sampling.rows.tolist() == [0] and step.sampling.tokens_R.tolist() == [3]
    store_sampled(batch, step, 91)
    step = apply(batch, ScheduledBatch(3, [0, 3]), 7)
    assert step.ids_T.tolist() == [91, 7] and step.sampling is not None and len(step.sampling.rows) == 2


def test_prompt_log_probabilities_need_the_id_after_a_chunk() -> None:
    batch = make()
    row = NewRow(1, 6, 0, [[3, 4]], GREEDY, 6, prompt_logprobs=2)
    message = ScheduledBatch(1, [1], [4], [row], token_ids=pack_ids(range(20, 24)), next_ids=pack_ids([24]))
    step = batch.step(batch.apply(message))
    assert step.prompt_logprobs is not None
    assert step.prompt_logprobs.tokens_P.tolist() == [
        0,
        1,
        2,
        3,
    ] and step.prompt_logprobs.next_ids_P.tolist() == [
        21,
        22,
        23,
        24,
    ]
    step = apply(batch, ScheduledBatch(2, [1], [2]), 24, 25)
    assert step.prompt_logprobs is not None and step.prompt_logprobs.next_ids_P.tolist() == [25]


def test_a_prefix_that_is_cached_is_not_computed_again() -> None:
    batch = make()
    row = new_row(1, list(range(20, 29)), [3, 4, 9], computed=8)
    step = apply(batch, ScheduledBatch(1, [1], [], [row]), 28)
    assert step.ids_T.tolist() == [28] and step.positions_T.tolist() == [8]
    assert step.groups[0].slots_T.tolist() == [36] and step.sampling is not None


def test_blocks_are_appended_to_each_group() -> None:
    batch = make(groups=2)
    store_sampled(
        batch, apply(batch, ScheduledBatch(1, [0], [4], [new_row(0, [1, 2, 3, 4], [6], [2])]), 1, 2, 3, 4), 5
    )
    step = apply(batch, ScheduledBatch(2, [0], [], [], [MoreBlocks(0, [[1], [9]])]))
    assert [group.slots_T.tolist() for group in step.groups] == [[4], [36]]


def test_a_decoding_row_is_reassigned_to_a_new_request() -> None:
    batch = make()
    store_sampled(batch, apply(batch, ScheduledBatch(1, [0], [2], [new_row(0, [1, 2], [0])]), 1, 2), 3)
    store_sampled(batch, apply(batch, ScheduledBatch(2, [0])), 4)
    step = apply(batch, ScheduledBatch(3, [0], [], [new_row(0, [40, 41], [5])]), 40)
    assert step.ids_T.tolist() == [40] and step.sampling is None
    step = apply(batch, ScheduledBatch(4, [0]), 41)
    assert step.ids_T.tolist() == [41] and step.groups[0].slots_T.tolist() == [21]
    store_sampled(batch, step, 42)
    assert apply(batch, ScheduledBatch(5, [0])).ids_T.tolist() == [42]


def test_rows_that_pause_keep_their_state() -> None:
    batch = make()
    rows = [new_row(row, [row], [row]) for row in range(3)]
    store_sampled(batch, apply(batch, ScheduledBatch(1, [0, 1, 2], [], rows), 0, 1, 2), 70, 71, 72)
    store_sampled(batch, apply(batch, ScheduledBatch(2, [0, 1, 2])), 80, 81, 82)
    store_sampled(batch, apply(batch, ScheduledBatch(3, [2])), 92)
    step = apply(batch, ScheduledBatch(4, [2, 0, 1]))
    assert step.ids_T.tolist() == [92, 80, 81] and step.positions_T.tolist() == [3, 2, 2]


def test_a_steady_decode_reuses_what_depends_on_the_rows_alone() -> None:
    batch = make()
    rows = [new_row(row, [row], [row]) for row in range(3)]
    store_sampled(batch, apply(batch, ScheduledBatch(1, [0, 1, 2], [], rows), 0, 1, 2), 1, 1, 1)
    steps = [apply(batch, ScheduledBatch(2 + n, [0, 1, 2])) for n in range(2)]
    assert steps[0].sampling is not None and steps[1].sampling is not None
    assert steps[0].sampling.rows is steps[1].sampling.rows


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (ScheduledBatch(1, [0], [3], [new_row(0, [1, 2], [0])]), "up to 3 are scheduled, 2 are known"),
        (ScheduledBatch(1, [0], [2], [new_row(0, [1, 2, 3], [0])]), "1 token ids for 2 known tokens"),
        (
            ScheduledBatch(1, [0], [1], [new_row(0, [1], [0])], next_ids=b"1234"),
            "1 next ids for 0 prompt chunks",
        ),
        (ScheduledBatch(1, [0], [1], [new_row(0, [1, 2], [0], computed=2)]), "one must be left"),
        (ScheduledBatch(1, [0], [1], [new_row(0, [1, 2], [0], [1])]), "longer than"),
        (ScheduledBatch(1, [9], [1], [new_row(9, [1], [0])]), "out of bounds"),
    ],
)
def test_a_batch_that_breaks_the_contract_is_an_error(batch: ScheduledBatch, message: str) -> None:
    with pytest.raises((ValueError, IndexError), match=message):
        apply(make(), batch, 1)


def test_random_steps_equal_a_row_by_row_computation() -> None:
    """Against a plain model of the protocol: every token's id, position and slot."""
    random = np.random.default_rng(5)
    batch = make(max_rows=6)
    tokens: dict[int, list[int]] = {}
    blocks: dict[int, list[int]] = {}
    known, computed = [0] * 6, [0] * 6
    for number in range(200):
        chosen = [int(row) for row in random.permutation(6)[: random.integers(1, 7)]]
        new_rows, counts, want, ids = [], [], [], []
        for row in chosen:
            if row not in tokens or len(tokens[row]) > 40 or random.random() < 0.1:
                tokens[row] = random.integers(0, 100, random.integers(1, 20)).tolist()
                blocks[row] = random.permutation(99)[:16].tolist()
                known[row], computed[row] = len(tokens[row]), 0
                new_rows.append(new_row(row, tokens[row], blocks[row]))
            count = int(random.integers(1, max(known[row] - computed[row], 1) + 1))
            counts.append(count)
            ids += tokens[row][computed[row] : computed[row] + count] if computed[row] < known[row] else []
            for position in range(computed[row], computed[row] + count):
                slot = blocks[row][position // BLOCK] * BLOCK + position % BLOCK
                want.append((tokens[row][position], position, slot))
            computed[row] += count
        columns = [] if set(counts) == {1} else counts
        step = apply(batch, ScheduledBatch(number, chosen, columns, new_rows), *ids)
        got = (step.ids_T.tolist(), step.positions_T.tolist(), step.groups[0].slots_T.tolist())
        assert list(zip(*got, strict=True)) == want
        sampling = [row for row in chosen if computed[row] >= known[row]]
        if sampling:
            sampled = random.integers(0, 100, len(sampling)).tolist()
            store_sampled(batch, step, *sampled)
            for row, token in zip(sampling, sampled, strict=True):
                tokens[row].append(token)
        else:
            assert step.sampling is None
