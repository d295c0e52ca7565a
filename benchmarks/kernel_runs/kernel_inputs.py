"""Arguments of the calls of a kernel benchmark."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atom_ops import AttentionPlan, Weight, plan_attention, rotation
from atom_ops.weights.samples import Format, random_weight
from benchmarks.kernel_runs.kernel_shapes import StepShape


def moved_to(value: Any, device: torch.device) -> Any:
    """The value with every tensor moved to `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved_to(part, device) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: moved_to(getattr(value, name), device) for name in names})
    return value


@dataclass(frozen=True)
class Inputs:
    """Makes random arguments on the device."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator
    weights: Format = "plain"
    """Format of the weights of linear layers."""

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, dtype=dtype or self.dtype, device=self.device, generator=self.generator)

    def weight(self, outputs: int, inputs: int) -> Tensor:
        return self.normal(outputs, inputs).div_(inputs**0.5)

    def layer(self, outputs: int, inputs: int) -> Weight:
        """The weight of a linear layer."""
        if self.weights == "plain":
            return self.weight(outputs, inputs)
        made = random_weight((outputs, inputs), self.weights, self.dtype, torch.Generator().manual_seed(1))
        weight: Weight = moved_to(made, self.device)
        return weight

    def ids(self, limit: int, *shape: int) -> Tensor:
        """Random ids below `limit`, int64 of `shape`."""
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
