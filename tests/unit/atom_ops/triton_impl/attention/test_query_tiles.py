"""The list of a step's query tiles, in Triton's interpreter."""

import numpy as np
import pytest

from atom_ops.triton_impl.hardware import target
from tests.helpers.kernels.paged_step import Step

pytestmark = pytest.mark.skipif(not target.INTERPRETED, reason="needs TRITON_INTERPRET=1")


def wanted_tiles(step: Step, length: int, min_tokens: int) -> list[tuple[int, int, int, int]]:
    found = []
    starts = np.cumsum([0, *step.query_lens]).tolist()
    lens = list(zip(step.query_lens.tolist(), step.context_lens.tolist(), strict=True))
    for row in sorted(range(len(lens)), key=lambda row: -lens[row][1]):
        queries, context = lens[row]
        if queries < min_tokens:
            continue
        for first in reversed(range(0, queries, length)):
            tile = min(length, queries - first)
            found.append((row, starts[row] + first, tile, context - queries + first))
    return found


@pytest.mark.parametrize(("length", "min_tokens"), [(16, 2), (128, 2), (32, 50)])
@pytest.mark.parametrize("padding", [0, 3])
def test_agrees_with_reference_triton_query_tiles(length: int, min_tokens: int, padding: int) -> None:
    """Equal contexts, decodes, more rows than are read at once, more tiles than are written at once."""
    from atom_ops.triton_impl.attention.query_tiles import ListTiles

    query_lens = [1, 40, 1100, 40, 2, 129, *[3] * 130, 70]
    context_lens = [90, 40, 1100, 40, 300, 129, *[33] * 130, 71]
    step = Step(query_lens, context_lens, 1, 1, width=16)
    plan = step.plan().padded(sum(query_lens) + 7 * padding, len(query_lens) + padding)
    listed = plan.derived(ListTiles(length, min_tokens))
    wanted = wanted_tiles(step, length, min_tokens)
    assert listed.count.item() == len(wanted) <= len(listed.tiles_N4)
    assert listed.tiles_N4[: len(wanted)].tolist() == [list(tile) for tile in wanted]
