"""Kernels of `linear` that the interpreter's plans do not choose."""

import pytest
import torch

from atom_ops import linear, triton_impl

pytestmark = pytest.mark.skipif(not triton_impl.INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize(("outputs", "inputs"), [(33, 64), (8, 70)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_triton_gemv_by_whole_rows(outputs: int, inputs: int, with_bias: bool) -> None:
    from atom_ops.triton_impl.linear import multiply
    from atom_ops.triton_impl.tuned import LinearPlan

    x, weight, bias = torch.randn(1, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    plan = LinearPlan(1, True, 4, inputs, 4, 1, tiles=3)
    found = multiply(plan, x, weight, bias if with_bias else None)
    torch.testing.assert_close(found, linear.reference(x, weight, bias if with_bias else None))
