"""Gathered contexts, in Triton's interpreter."""

import numpy as np
import pytest
import torch

from atom_ops.ops.attention.kv_cache import FP8, read_kv
from atom_ops.triton_impl.hardware import target
from tests.helpers.kernels.paged_step import Step

pytestmark = pytest.mark.skipif(not target.INTERPRETED, reason="needs TRITON_INTERPRET=1")

QUERY_LENS = [1, 40, 30, 35, 20, *[1] * 130, 33]
CONTEXT_LENS = [90, 40, 300, 35, 500, *[16] * 130, 70]


@pytest.mark.parametrize("cache_dtype", [FP8, torch.float32])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("room", [10_000, 448, 256, 64])
@pytest.mark.parametrize(("kv_heads", "width"), [(2, 64), (3, 80), (16, 128)])
def test_agrees_with_reference_triton_gathered_contexts(
    kv_heads: int,
    width: int,
    room: int,
    window: int,
    cache_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of at least 30 queries have their contexts where they fit `room` tokens; others are not read.

    Without float8 codes only those of at least 65 tokens.
    """
    from atom_ops.triton_impl.attention import gathered_contexts

    slot_bytes = 2 * kv_heads * width * 4
    least = 1 if cache_dtype == FP8 else 65
    for name, value in (
        ("FEWEST_QUERIES", 30),
        ("FEWEST_COPIED", 30),
        ("LEAST_COPIED_BYTES", least * slot_bytes),
        ("MOST_BYTES", room * slot_bytes),
    ):
        monkeypatch.setattr(gathered_contexts, name, value)
    step = Step(
        QUERY_LENS, CONTEXT_LENS, kv_heads, kv_heads, cache_dtype=cache_dtype, width=width, window=window
    )
    plan = step.plan().padded(len(step.q) + 9, len(QUERY_LENS) + 3)
    gathered = gathered_contexts.gather_contexts(step.cache, plan, torch.float32, window)
    if room < least:
        assert gathered is None
        return
    assert gathered is not None and len(gathered.kv) <= room
    taken = 0
    for row, (queries, context) in enumerate(zip(QUERY_LENS, CONTEXT_LENS, strict=True)):
        origin = int(gathered.origins_R[row])
        first = max(0, context - queries - window + 1) // 16 * 16 if window else 0
        size = -(-(context - first) // 64) * 64
        is_wanted = queries >= 30 and least <= size <= len(gathered.kv)
        assert (origin != gathered_contexts.NOT_GATHERED.value) == (
            is_wanted and taken + size <= len(gathered.kv)
        )
        if is_wanted and taken + size <= len(gathered.kv):
            token = np.arange(first, context)
            slots = torch.from_numpy(step.table[row][token // 16] * 16 + token % 16).long()
            wanted = read_kv(step.cache, slots, torch.float32)
            found = gathered.kv[origin + first : origin + context]
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6, equal_nan=True)
        taken += size if is_wanted else 0
    assert (gathered.origins_R[len(QUERY_LENS) :] == gathered_contexts.NOT_GATHERED.value).all()


def test_nothing_is_gathered_without_room_or_without_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_ops.triton_impl.attention import gathered_contexts

    step = Step([127, 1], [300, 40], 2, 2, cache_dtype=FP8, width=64)
    assert gathered_contexts.gather_contexts(step.cache, step.plan(), torch.float32, 0) is None
    step = Step([128, 1], [300, 40], 2, 2, cache_dtype=FP8, width=64)
    assert gathered_contexts.gather_contexts(step.cache, step.plan(), torch.float32, 0) is not None
    monkeypatch.setattr(gathered_contexts, "MOST_BYTES", 1000)
    assert gathered_contexts.gather_contexts(step.cache, step.plan(), torch.float32, 0) is None


def test_short_contexts_and_few_queries_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_ops.triton_impl.attention import gathered_contexts

    monkeypatch.setattr(gathered_contexts, "LEAST_COPIED_BYTES", 1500 * 2 * 2 * 64 * 4)

    def is_copied(queries: int, context: int, window: int = 0) -> bool:
        step = Step([queries], [context], 2, 2, cache_dtype=torch.float32, width=64)
        gathered = gathered_contexts.gather_contexts(step.cache, step.plan(), torch.float32, window)
        return gathered is not None

    assert is_copied(1024, 1500)
    assert not is_copied(1023, 1500) and not is_copied(1024, 1499) and not is_copied(1024, 1500, window=99)
