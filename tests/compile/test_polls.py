"""Where programs of a GEMM wait for the partial sums of others, one thread polls a place.

Of two threads that poll the same place, one may find a sum and the other still EMPTY, and Triton may store
the values of either.
"""

from dataclasses import replace

import torch

from atom_ops import triton_impl
from tests.compile.test_chips import packed, pytestmark, tensor
from tests.helpers.kernels.chips import CHIPS, compiling_for

__all__ = ["pytestmark"]

OUTPUTS, INPUTS = 31 * 128, 6144
"""A weight with tiles that programs share, by every plan."""


def test_stream_k() -> None:
    triton_impl.load()
    from atom_ops.triton_impl.linear import hopper_linear
    from atom_ops.triton_impl.plans.linear_plans import StreamKPlan, stream_k
    from atom_ops.triton_impl.quantized.quantized_candidates import CLASSES, candidates
    from atom_ops.triton_impl.quantized.rounded_rows import round_rows

    key = ("fp8-block", OUTPUTS, INPUTS)
    plans = (plan for _, tokens in CLASSES for plan in candidates(key, tokens))
    tiles = {(plan.rows, plan.tile): plan for plan in plans if isinstance(plan, StreamKPlan)}
    with compiling_for(CHIPS["H200"]) as compiled:
        for plan in tiles.values():
            rows, _ = round_rows(tensor(plan.tile, INPUTS), "e4m3", plan.tile)
            hopper_linear.multiply_e4m3(plan, rows, plan.tile, packed(*key), None, torch.bfloat16)
        hopper_linear.multiply(stream_k(128, 6, 64), tensor(64, INPUTS), tensor(OUTPUTS, INPUTS), None)
    kernels = [each for each in compiled if each.kernel == "hopper_linear._stream_k"]
    assert len(kernels) == len(tiles) + 1
    assert not [each for each in kernels if each.shared_polls]


def test_split_k() -> None:
    triton_impl.load()
    from atom_ops.triton_impl.quantized import four_bit_split_k
    from atom_ops.triton_impl.quantized.quantized_plans import WgmmaPlan

    weight = replace(packed("mxfp4", 4096, 4096), zeros=None)
    plans = [WgmmaPlan(tokens, tokens, 3, 4) for tokens in (8, 16, 32, 64, 128)]
    plans += [WgmmaPlan(tokens, tokens, 2, 4, 2) for tokens in (8, 64)]
    with compiling_for(CHIPS["H200"]) as compiled:
        for plan in plans:
            four_bit_split_k.multiply(plan, tensor(plan.tile, 4096), weight, None)
    assert len(compiled) == len(plans)
    assert not [each for each in compiled if each.shared_polls]
