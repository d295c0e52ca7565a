"""How much a provider may differ from the reference, by the dtype of its inputs."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """|actual - expected| <= absolute + relative * |expected|, element by element."""

    absolute: float
    relative: float


Tolerances = dict[torch.dtype, Tolerance]

EXACT: Tolerances = {dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
"""For ops that copy values or select ids and do no arithmetic."""

DEFAULT: Tolerances = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2),
}
"""A few roundings in the dtype: element-wise ops and short reductions."""

REDUCTION: Tolerances = {
    torch.float32: Tolerance(1e-4, 1e-4),
    torch.float16: Tolerance(1e-2, 1e-2),
    torch.bfloat16: Tolerance(6e-2, 6e-2),
}
"""Long sums whose order differs between implementations: GEMM, attention."""

FP8_ACTIVATIONS: Tolerances = dict.fromkeys(
    (torch.float32, torch.float16, torch.bfloat16), Tolerance(1.5e-1, 6e-2)
)
"""GEMMs that round their inputs to e4m3, with results of a standard deviation of about 1.

Rounding changes an input by up to 1/16 of itself, on average 2.6 %, and so a result by 0.026 on
average: 0.15 is more than five times as much.
"""

INT8_ACTIVATIONS: Tolerances = dict.fromkeys(
    (torch.float32, torch.float16, torch.bfloat16), Tolerance(8e-2, 6e-2)
)
"""GEMMs that round their inputs to int8, with results of a standard deviation of about 1.

Each token's largest input is 127 steps: with inputs up to 4 a result changes by 0.009 on average,
and about twice as much where activations have long tails.
"""

INT16_ACTIVATIONS: Tolerances = REDUCTION | {torch.float32: Tolerance(5e-4, 1e-4)}
"""GEMMs that round their inputs to int16, with results of a standard deviation of about 1.

The largest input of a group is 32,767 steps: with inputs up to 4 a result changes by 3e-5 on average, and
several times as much where offsets nearly cancel the codes.
"""
