"""Every op x kernel x dtype x case of the op's own table, on the GPU."""

from typing import Any

import pytest
import torch

from atom_ops import backend
from atom_ops.op import REFERENCE, Case, Op, Provider
from tests.helpers.kernels.op_cases import CPU, check, table

GPU = torch.device("cuda", 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    ("op", "provider", "dtype", "case"),
    [row for row in table(GPU) if row.values[1].name != REFERENCE] if torch.cuda.is_available() else [],
)
def test_agrees_with_reference(op: Op[..., Any], provider: Provider, dtype: torch.dtype, case: Case) -> None:
    # What the reference calls runs in torch: it is computed on the CPU.
    backend.resolve(CPU, [REFERENCE])
    check(op, provider, dtype, case, GPU)
