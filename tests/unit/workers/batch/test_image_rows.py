"""Where images are in a step: their tokens, those before them, and the positions of RoPE."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atom.shared.config.checkpoint import ImageSettings
from atom.shared.messages.images import RowImage
from atom.shared.messages.worker import NewRow
from tests.helpers.engine.core_driver import GREEDY
from workers.batch.block_table import BatchLimits
from workers.batch.image_rows import ImageRows, StepTokens

FEATURES = torch.arange(6.0)[:, None, None]
"""The features of an image of 2 x 3 tokens."""


BY_AXIS = ImageSettings(9, {}, 4, 2, 384, 1 / 255, [0.5] * 3, [0.5] * 3)


def made(*starts: int, settings: ImageSettings = BY_AXIS) -> ImageRows:
    """Two rows: one of text, and one with such an image at each of these positions."""
    rows = ImageRows(BatchLimits(2, 64, 4), torch.device("cpu"), lambda key: FEATURES, settings)
    images = [RowImage(b"k", start, 2, 3) for start in starts]
    rows.admit(NewRow(0, 20, 0, [[]], GREEDY, 20))
    rows.admit(NewRow(1, 20, 0, [[]], GREEDY, 20, images=images))
    return rows


def step(*counts: tuple[int, int]) -> StepTokens:
    """(first position, tokens) of both rows."""
    starts, lengths = np.array(counts, np.int64).T
    past = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    return StepTokens(np.arange(2), starts, lengths, past)


def test_tokens_whose_next_one_is_in_an_image() -> None:
    """The one before an image, and all of it but the last; not the last token of the row before."""
    found = made(3).inputs(step((0, 4), (2, 9)), torch.arange(13))
    assert found is not None and found.tokens is not None and found.next_tokens is not None
    assert found.tokens.tokens_M.tolist() == [5, 6, 7, 8, 9, 10]
    assert found.next_tokens.tokens_M.tolist() == [4, 5, 6, 7, 8, 9]
    assert found.next_tokens.features_MLD.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    found = made(3).inputs(step((0, 4), (5, 4)), torch.arange(8))
    assert found is not None and found.next_tokens is not None
    assert found.next_tokens.tokens_M.tolist() == [4, 5, 6]
    assert found.next_tokens.features_MLD.flatten().tolist() == [3, 4, 5]


def test_the_positions_of_generated_tokens() -> None:
    rows = made(3, 10)
    positions = rows.positions(torch.tensor([20, 20, 21]), torch.tensor([0, 1, 1]))
    assert positions.tolist() == [20, 14, 15]


def test_positions_that_are_indices() -> None:
    rows = made(3, 10, settings=replace(BY_AXIS, by_axis=False))
    found = rows.inputs(step((0, 4), (2, 9)), torch.arange(13))
    assert found is not None and found.positions.tolist() == list(range(13))
    assert found.tokens is not None and found.tokens.tokens_M.tolist() == [5, 6, 7, 8, 9, 10, 12]
    assert rows.positions(torch.tensor([20, 21]), torch.tensor([0, 1])).tolist() == [20, 21]


def test_tokens_that_see_those_after_them() -> None:
    rows = made(3, 10, settings=replace(BY_AXIS, by_axis=False, sees_ahead=True))
    ahead = rows.ahead(step((0, 4), (2, 14)))
    assert ahead is not None
    assert ahead.tolist() == [0] * 4 + [0, 5, 4, 3, 2, 1, 0, 0, 5, 4, 3, 2, 1, 0]
    assert rows.ahead(step((0, 4), (9, 1))) is None
    with pytest.raises(ValueError, match="computes tokens 2 to 8 of a row, and cuts its image at 3 to 9"):
        rows.ahead(step((0, 4), (2, 6)))
    assert made(3).ahead(step((0, 4), (2, 6))) is None
