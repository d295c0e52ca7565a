"""Plans of quantized weights on a device: measured ones, and general ones for other numbers of tokens."""

from collections.abc import Mapping
from functools import cache

import torch

from atom_ops.triton_impl.hardware.target import INTERPRETED
from atom_ops.triton_impl.plans.shipped import shipped_on
from atom_ops.triton_impl.quantized.quantized_call import Packed
from atom_ops.triton_impl.quantized.quantized_plans import (
    MANY,
    GemmPlan,
    GemvPlan,
    Key,
    QuantizedPlans,
    general_plans,
    key_of,
)
from atom_ops.weights import FourBitWords

_INTERPRETED = (
    GemvPlan(8, 128, 4),
    GemmPlan(8, 16, 16, 128, 4, 2, split_k=2),
    GemmPlan(MANY, 32, 32, 128, 4, 2),
)


def plans_of(weight: Packed, bfloat16: bool = True) -> QuantizedPlans:
    """The measured plans of this format and shape, or else general ones.

    4-bit weights were measured with activations and results in bfloat16.
    """
    if INTERPRETED:
        return _INTERPRETED
    if isinstance(weight, FourBitWords) and not bfloat16:
        return general_plans(key_of(weight))
    return _all_plans(weight.scales.device, key_of(weight))


@cache
def _all_plans(device: torch.device, key: Key) -> QuantizedPlans:
    return with_general(key, plans_on(device).get(key, ()))


def with_general(key: Key, measured: QuantizedPlans) -> QuantizedPlans:
    """Measured plans, and the general ones for more tokens; the last one has no limit and no library."""
    most = measured[-1].tokens if measured else 0
    more = (plan for plan in general_plans(key) if plan.tokens > most or plan.tokens == MANY)
    return (*measured, *more)


def add_plans(device: torch.device, measured: Mapping[Key, QuantizedPlans]) -> None:
    """Use these plans on the device from now on."""
    plans_on(device).update(measured)
    _all_plans.cache_clear()


@cache
def plans_on(device: torch.device) -> dict[Key, QuantizedPlans]:
    """The shipped plans, and what `add_plans` added."""
    return dict(shipped_on(device).quantized)
