"""A model that drafts, in every way to launch steps, and on two ranks."""

from collections.abc import Iterator
from typing import cast

import pytest
import torch

from atom_ops import SamplingBatch
from tests.unit.workers.spec_decode.test_speculation import (
    CPU,
    Driver,
    TwoTokensBack,
    runner,
)
from workers.batch.block_table import BatchLimits, BlockTable
from workers.layers.causal_lm import CausalLM
from workers.layers.context import ForwardContext
from workers.spec_decode.draft_rows import Computed
from workers.spec_decode.drafter import Drafter, ModelProposer
from workers.spec_decode.proposer import Proposer


class Twin(Drafter):
    """Drafts as the target of these tests computes, from a cache of its own.

    With pairs it caches, in the slot of each token, the id after it. So every draft is right, unless a token
    was written to a wrong slot, or read from one.
    """

    groups = (1,)

    def __init__(self, reads_pairs: bool):
        self.reads_pairs = reads_pairs
        self._model = TwoTokensBack()

    def follow(self, computed: Computed, next_ids_T: torch.Tensor) -> torch.Tensor:
        ids_T = next_ids_T if self.reads_pairs else computed.ids_T
        return self._compute(ids_T, computed.positions_T, computed.context)

    def predict(
        self, ids_R: torch.Tensor, hidden_RD: torch.Tensor, positions_R: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        return self._compute(ids_R, positions_R, ctx)

    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        return CausalLM.sample(cast(CausalLM, self._model), hidden_RD, settings, positions_R)

    def _compute(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self._model(ids_T, positions_T, ForwardContext([], ctx.groups[1:]))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: one thread is fastest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain() -> Driver:
    made = Driver(runner(0), 0, 1)
    made.run()
    return made


@pytest.mark.parametrize("num_drafts", [1, 4])
@pytest.mark.parametrize("reads_pairs", [True, False], ids=["pairs", "tokens"])
@pytest.mark.parametrize("way", ["exact", "upper bounds", "graphs", "some graphs"])
def test_drafts_of_the_target_are_accepted(
    plain: Driver, way: str, reads_pairs: bool, num_drafts: int
) -> None:
    """Greedy and sampled rows, with drafts in blocks that the step itself does not need."""

    def drafts(limits: BatchLimits, tables: list[BlockTable], exact: bool) -> Proposer:
        return ModelProposer(Twin(reads_pairs), limits, tables, CPU, exact)

    sizes = {"graphs": [1, 2, 4, 6], "some graphs": [3]}.get(way)
    driver = Driver(runner(num_drafts, way == "exact", sizes, proposes=drafts), num_drafts, 2)
    driver.core.lookahead = num_drafts - reads_pairs
    driver.core.sends_next_ids = reads_pairs
    assert driver.run() == plain.outputs
    # Logits processors, which drafts do not have, change some tokens; the first pair lacks a token.
    assert driver.num_accepted > 0.6 * driver.num_proposed > 100
