"""Gated activations."""

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op


def _case(tokens: int, width: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor]:
        return (torch.randn(tokens, 2 * width, generator=generator).to(dtype),)

    return Case(f"{tokens}x{width}", make)


@op([_case(1, 1536), _case(9, 40), _case(64, 256), _case(2, 12288)])
def silu_and_mul(x_T2F: Tensor) -> Tensor:
    """silu(first half) * second half, [T, 2F] -> [T, F]."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return functional.silu(gate_TF) * up_TF
