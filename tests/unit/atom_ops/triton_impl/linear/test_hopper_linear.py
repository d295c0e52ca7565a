"""The stream-K GEMM on Hopper: Gluon has no interpreter, so what can be told without a GPU."""

import math

import pytest

pytest.importorskip("triton")

from atom_ops.triton_impl.hardware import target
from atom_ops.triton_impl.plans import tuning
from atom_ops.triton_impl.plans.linear_plans import StreamKPlan
from atom_ops.triton_impl.plans.shipped import shipped_plans

pytestmark = pytest.mark.skipif(target.INTERPRETED, reason="Gluon is not interpreted")

SHAPES = (4096, 4096), ("fp8-block", 4096, 4096), ("fp8-channel", 4096, 4096)


def stream_k_plans() -> set[StreamKPlan]:
    """All that are shipped or tried."""
    shipped = shipped_plans("NVIDIA H200")
    known = [
        plan for table in (shipped.linear, shipped.quantized) for plans in table.values() for plan in plans
    ]
    tried = [
        plan
        for shape in SHAPES
        for least, tokens in tuning.classes_of(shape)
        for plan in tuning.candidates(shape, least, tokens)
    ]
    return {plan for plan in (*known, *tried) if isinstance(plan, StreamKPlan)}


def test_one_thread_polls_a_partial_sum() -> None:
    """Two that poll the same place may find EMPTY and a sum, and Triton may store either: a NaN at times."""
    from atom_ops.triton_impl.linear.hopper_linear import reader_layout, reduced_at_once

    tiles = {(plan.rows, reduced_at_once(plan.tile)) for plan in stream_k_plans()}
    assert (64, 4) in tiles  # fewer places than 128 threads times 4
    for tile in tiles:
        layout = reader_layout(*tile)
        assert math.prod(layout.threads_per_warp) == 32 and math.prod(layout.warps_per_cta) == 4
        sizes = zip(layout.size_per_thread, layout.threads_per_warp, layout.warps_per_cta, strict=True)
        for size, at_once in zip(tile, map(math.prod, sizes), strict=True):
            assert size % at_once == 0, (tile, layout)
