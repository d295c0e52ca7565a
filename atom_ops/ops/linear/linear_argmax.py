"""The greedy tokens of a language model's head, whose logits need not be stored."""

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.linear.linear import linear
from atom_ops.ops.sampling.sampling import top1
from atom_ops.tolerances import EXACT
from atom_ops.weights import Weight


def _case(rows: int, inputs: int, outputs: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Weight]:
        # Small integers: sums are exact, and the largest of a row is there several times.
        x, weight = (torch.randint(-1, 2, (n, inputs), generator=generator) for n in (rows, outputs))
        return x.to(dtype), weight.to(dtype)

    return Case(f"{rows}x{inputs}x{outputs}", make)


@op([_case(1, 64, 50), _case(9, 32, 4133), _case(70, 96, 1000)], EXACT, composed=True)
def linear_argmax(x_RI: Tensor, weight: Weight) -> Tensor:
    """The output of each row whose product in float32 is largest, of several the smallest: int64 [R].

    `weight` [O, I] as for `linear`. A row with NaN gets some output.
    """
    return top1(linear(x_RI, weight, None, torch.float32))[1]
