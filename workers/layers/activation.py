"""Activation functions of gated MLPs, fused with the down projection, by their name in config.json."""

from collections.abc import Callable
from functools import partial

import torch

from atom_ops import (
    ClampedSwiglu,
    ExpertActivation,
    Weight,
    clamped_swiglu,
    gelu_tanh_and_mul,
    linear,
    silu_and_mul_linear,
)

GatedLinear = Callable[[torch.Tensor, Weight, torch.Tensor | None], torch.Tensor]
"""Maps [T, 2F] (gate, then up), the weight and the bias of a linear layer to [T, O]."""


def _gelu_tanh_and_mul_linear(x_T2F: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(gelu_tanh_and_mul(x_T2F), weight, bias)


def _clamped_linear(
    clamp: ClampedSwiglu, x_T2F: torch.Tensor, weight: Weight, bias: torch.Tensor | None
) -> torch.Tensor:
    return linear(clamped_swiglu(x_T2F, clamp.limit, clamp.alpha, clamp.shift), weight, bias)


_FUNCTIONS: dict[str, GatedLinear] = {
    "silu": silu_and_mul_linear,
    "gelu_pytorch_tanh": _gelu_tanh_and_mul_linear,
}

_OF_EXPERTS = "silu"


def check_expert_activation(hidden_act: str) -> None:
    """Raise ValueError for an activation that the op `experts` does not have."""
    if hidden_act != _OF_EXPERTS:
        raise ValueError(f"hidden_act {hidden_act} is not supported in experts; supported is {_OF_EXPERTS}")


def gated_linear(hidden_act: str, instead: ExpertActivation = None) -> GatedLinear:
    """The function for that activation, or for the one `instead` of it.

    Raises ValueError that lists the supported ones.
    """
    if instead is not None:
        return partial(_clamped_linear, instead)
    if hidden_act not in _FUNCTIONS:
        supported = ", ".join(_FUNCTIONS)
        raise ValueError(f"hidden_act {hidden_act} is not supported; supported are: {supported}")
    return _FUNCTIONS[hidden_act]
