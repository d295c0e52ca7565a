"""Forced acceptance: wrong drafts become the text, as many as asked for, in every way to launch steps."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from atom_ops import NO_DRAFT
from tests.unit.workers.spec_decode.test_drafter import Failing, make
from tests.unit.workers.spec_decode.test_speculation import CPU, VOCAB, Driver, TwoTokensBack
from workers.spec_decode.draft_rows import DraftRows
from workers.spec_decode.forced_acceptance import ForcedAcceptance

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = 10**6


def forced(way: str, length: float) -> Driver:
    """Requests with three drafts a step, all of them wrong."""
    driver = make(way, Failing(True, ALL), 3, forced_length=length)
    driver.run()
    return driver


@pytest.mark.parametrize("way", ["exact", "upper bounds", "graphs"])
@pytest.mark.parametrize("length", [1.0, 2.6, 4.0])
def test_as_many_drafts_are_accepted_as_asked_for(way: str, length: float) -> None:
    driver = forced(way, length)
    per_step = 3 * driver.num_accepted / driver.num_proposed
    assert abs(per_step - (length - 1)) < 0.1, "only rows at their end have fewer drafts"


@pytest.mark.parametrize("way", ["exact", "upper bounds", "graphs"])
def test_accepted_drafts_are_the_text(way: str) -> None:
    """Each greedy token is the model's after the text so far, or a wrong draft: one more than the model's."""
    tokens = forced(way, 2.6).outputs[0]
    following = TwoTokensBack()._next
    right = [int(following[last, before]) for before, last in pairwise(tokens)]
    differences = {(token - model) % VOCAB for token, model in zip(tokens[2:], right, strict=False)}
    assert differences == {0, 1}


def test_the_same_requests_have_the_same_text() -> None:
    assert forced("upper bounds", 2.6).outputs == forced("upper bounds", 2.6).outputs


def test_rows_without_drafts_sample() -> None:
    """A row with one draft, one that has none, and padding; three tokens a step are forced."""
    drafts_RK = torch.tensor([[7, NO_DRAFT], [NO_DRAFT, NO_DRAFT], [NO_DRAFT, NO_DRAFT]])
    rows = np.arange(3)
    drafts = DraftRows(
        rows,
        np.ones(3, np.bool_),
        torch.from_numpy(rows),
        torch.tensor([5, 9, -1]),
        drafts_RK,
        rows.repeat(3),
        np.tile(rows, 3),
        None,
    )
    ids_S = torch.arange(20, 29)
    kept, found_S = ForcedAcceptance(3.0, CPU).apply(drafts, ids_S)
    assert found_S.tolist() == [7, 21, 22, 23, 24, 25, 26, 27, 28]
    assert torch.equal(kept.drafts_RK, drafts_RK)
    none, sampled_S = ForcedAcceptance(1.0, CPU).apply(drafts, ids_S)
    assert (none.drafts_RK == NO_DRAFT).all() and torch.equal(sampled_S, ids_S)
