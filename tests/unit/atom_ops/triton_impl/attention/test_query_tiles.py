"""The list of a step's query tiles, and prompts gathered from a float8 cache, in Triton's interpreter."""

import numpy as np
import pytest
import torch

from atom_ops import KVLayer
from atom_ops.ops.attention.kv_cache import FP8, read_kv
from atom_ops.triton_impl.hardware import target
from tests.helpers.kernels.paged_step import Step

pytestmark = pytest.mark.skipif(not target.INTERPRETED, reason="needs TRITON_INTERPRET=1")


WHOLE_PROMPT = 35
"""Fewest tokens of a whole prompt."""


def wanted_tiles(step: Step, length: int, min_tokens: int, whole: bool) -> list[tuple[int, int, int, int]]:
    found = []
    starts = np.cumsum([0, *step.query_lens]).tolist()
    lens = list(zip(step.query_lens.tolist(), step.context_lens.tolist(), strict=True))
    for row in sorted(range(len(lens)), key=lambda row: -lens[row][1]):
        queries, context = lens[row]
        if queries < min_tokens or (queries == context and queries >= WHOLE_PROMPT) != whole:
            continue
        for first in reversed(range(0, queries, length)):
            tile = min(length, queries - first)
            found.append((row, starts[row] + first, tile, context - queries + first))
    return found


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("length", "min_tokens"), [(16, 2), (128, 2), (32, 50)])
@pytest.mark.parametrize("padding", [0, 3])
def test_agrees_with_reference_triton_query_tiles(
    length: int, min_tokens: int, whole: bool, padding: int
) -> None:
    """Equal contexts, decodes, more rows than are read at once, more tiles than are written at once."""
    from atom_ops.triton_impl.attention.query_tiles import ListTiles

    query_lens = [1, 40, 1100, 40, 2, 129, *[3] * 130, 70]
    context_lens = [90, 40, 1100, 40, 300, 129, *[33] * 130, 71]
    step = Step(query_lens, context_lens, 1, 1, width=16)
    plan = step.plan().padded(sum(query_lens) + 7 * padding, len(query_lens) + padding)
    listed = plan.derived(ListTiles(length, min_tokens, WHOLE_PROMPT, whole))
    wanted = wanted_tiles(step, length, min_tokens, whole)
    assert listed.count.item() == len(wanted) <= len(listed.tiles_N4)
    assert listed.tiles_N4[: len(wanted)].tolist() == [list(tile) for tile in wanted]


@pytest.mark.parametrize(("kv_heads", "width"), [(2, 64), (3, 80), (16, 128)])
def test_agrees_with_reference_triton_gathered_prompts(kv_heads: int, width: int) -> None:
    """Only tokens of whole prompts are read: other rows have block table entries outside of the cache."""
    from atom_ops.triton_impl.attention.gathered_prompts import gather_prompts
    from atom_ops.triton_impl.attention.query_tiles import ListTiles

    step = Step([1, 40, 30, 35], [90, 40, 300, 35], kv_heads, kv_heads, cache_dtype=FP8, width=width)
    plan = step.plan()
    assert step.cache.scale is not None
    listed = plan.derived(ListTiles(16, 20, WHOLE_PROMPT, whole=True))
    found = gather_prompts(step.cache, plan, listed, torch.float32)
    for row, first in ((1, 1), (3, 71)):
        place = np.arange(step.query_lens[row])
        slots = step.table[row][place // 16] * 16 + place % 16
        cache = KVLayer(step.cache.kv, step.cache.scale)
        wanted = read_kv(cache, torch.from_numpy(slots.astype(np.int64)), torch.float32)
        torch.testing.assert_close(found[first : first + len(place)], wanted, atol=1e-6, rtol=1e-6)
