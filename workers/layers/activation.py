"""Activation functions of gated MLPs, fused with the down projection, by their name in config.json."""

from collections.abc import Callable

import torch

from atom_ops import Weight, silu_and_mul_linear

GatedLinear = Callable[[torch.Tensor, Weight, torch.Tensor | None], torch.Tensor]
"""Maps [T, 2F] (gate, then up), the weight and the bias of a linear layer to [T, O]."""


_FUNCTIONS: dict[str, GatedLinear] = {"silu": silu_and_mul_linear}


def gated_linear(hidden_act: str) -> GatedLinear:
    """The function for that activation. Raises ValueError that lists the supported ones."""
    if hidden_act not in _FUNCTIONS:
        supported = ", ".join(_FUNCTIONS)
        raise ValueError(f"hidden_act {hidden_act} is not supported; supported are: {supported}")
    return _FUNCTIONS[hidden_act]
