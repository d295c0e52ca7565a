"""SGLang's batch of a step as ATOM's attention plan."""

import pytest
import torch

from atom.plugin.sglang.step_plan import Planner
from tests.helpers.plugins.sglang_host import Mode, batch_of

SLOTS = torch.tensor(
    [[4, 5, 6, 7, 20, 21, 22, 23, 0, 0, 0, 0], [12, 13, 14, 15, 8, 9, 10, 11, 28, 29, 30, 31]],
    dtype=torch.int32,
)
"""Pages of four slots, of two requests."""


def test_a_page_is_a_block() -> None:
    step = Planner(SLOTS, 4).step(batch_of(Mode.EXTEND, SLOTS, [6, 9], [6, 4]))
    plan = step.full.plan
    assert plan.block_table_RW.tolist() == [[1, 5, 0], [3, 2, 7]]
    assert plan.context_lens_R.tolist() == [6, 9]
    assert plan.query_starts_R1.tolist() == [0, 6, 10]
    assert (plan.min_query_len, plan.max_query_len, plan.max_context_len, plan.num_tokens) == (4, 6, 9, 10)
    assert step.full.slots_T.tolist() == [4, 5, 6, 7, 20, 21, 8 + 1, 10, 11, 28]
    assert step.windowed is step.full


def test_each_token_is_a_block_with_pages_of_one() -> None:
    plan = Planner(SLOTS, 1).step(batch_of(Mode.DECODE, SLOTS, [6, 9], [1, 1])).full.plan
    assert plan.block_table_RW.tolist() == SLOTS[:, :9].tolist()
    assert plan.query_starts_R1.tolist() == [0, 1, 2]
    assert plan.host is not None and plan.host.exact and plan.host.query_lens.tolist() == [1, 1]


def test_layers_with_a_window_have_slots_of_their_own_pool() -> None:
    mapping = torch.arange(40) // 4 % 4 * 4 + torch.arange(40) % 4
    step = Planner(SLOTS, 4).step(batch_of(Mode.DECODE, SLOTS, [6, 9], [1, 1]), mapping)
    assert step.full.slots_T.tolist() == [21, 28]
    assert step.windowed.slots_T.tolist() == [5, 12]
    assert step.windowed.plan.block_table_RW.tolist() == [[1, 1, 0], [3, 2, 3]]


def test_another_kind_of_step_is_refused() -> None:
    with pytest.raises(ValueError, match="steps of the kind TARGET_VERIFY"):
        Planner(SLOTS, 4).step(batch_of(Mode.TARGET_VERIFY, SLOTS, [6], [2]))
