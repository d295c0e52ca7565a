"""Arguments of the calls of a kernel benchmark."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atom.benchmarks.kernel_shapes import StepShape
from atom_ops import AttentionPlan, plan_attention, rotation


@dataclass(frozen=True)
class Inputs:
    """Makes random arguments on the device."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, dtype=dtype or self.dtype, device=self.device, generator=self.generator)

    def weight(self, outputs: int, inputs: int) -> Tensor:
        return self.normal(outputs, inputs).div_(inputs**0.5)

    def ids(self, limit: int, *shape: int) -> Tensor:
        """int64."""
        return torch.randint(0, limit, shape, device=self.device, generator=self.generator)

    def rotation(self, tokens: int, width: int, interleaved: bool = False) -> tuple[Tensor, Tensor]:
        """RoPE cosines and sines for each token."""
        angles = self.normal(tokens, 1, width // 2, dtype=torch.float32)
        return rotation(angles.cos(), angles.sin(), interleaved)


@dataclass(frozen=True)
class Work:
    """One call of an op, with its cost."""

    label: str
    make: Callable[[Inputs], tuple[Any, ...]]
    flops: float | None = 0.0
    """Floating-point operations; None: the cost is unknown, and only the time is reported."""
    moved: float | None = None
    """Bytes moved; None: all bytes of the arguments and results."""


def slots_of(step: StepShape, inputs: Inputs) -> Tensor:
    """Cache slots of the step's new tokens, int64 [T]."""
    return torch.from_numpy(step.slots()).to(inputs.device)


def plan_of(step: StepShape, inputs: Inputs) -> AttentionPlan:
    """The attention plan of the step."""
    new, context = (np.full(step.rows, count, np.int32) for count in (step.new, step.context))
    return plan_attention(new, context, step.block_table(), inputs.device)
