"""Activation functions of gated MLPs, fused with the down projection, by their name in config.json."""

from collections.abc import Callable

import torch

from atom_ops import Weight, silu_and_mul_linear

GatedLinear = Callable[[torch.Tensor, Weight, torch.Tensor | None], torch.Tensor]
"""Maps [T, 2F] (gate beside up), the weight and the bias of a linear layer to [T, O]."""

_GATED: dict[str, GatedLinear] = {"silu": silu_and_mul_linear}


def gated_linear(hidden_act: str) -> GatedLinear:
    """The function for that activation. Raises ValueError that lists the supported ones."""
    if hidden_act not in _GATED:
        raise ValueError(f"hidden_act {hidden_act} is not supported; supported are: {', '.join(_GATED)}")
    return _GATED[hidden_act]
