"""Every op x provider x dtype x case of the op's own table, on the CPU."""

from typing import Any

import pytest
import torch

import atom_ops
from atom_ops import backend
from atom_ops.op import REGISTRY, Case, Op, Provider
from tests.helpers.kernels.op_cases import CPU, check, table


@pytest.mark.parametrize(("op", "provider", "dtype", "case"), list(table(CPU)))
def test_agrees_with_reference(op: Op[..., Any], provider: Provider, dtype: torch.dtype, case: Case) -> None:
    backend.resolve(CPU)
    check(op, provider, dtype, case, CPU)


def test_every_public_op_is_in_the_table() -> None:
    public = {name for name in atom_ops.__all__ if isinstance(getattr(atom_ops, name), Op)}
    assert public | {"masked_attention", "store_words"} == set(REGISTRY)
    assert all(op.cases and op.__doc__ for op in REGISTRY.values())
