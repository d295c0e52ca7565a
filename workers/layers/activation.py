"""Gated MLPs' activation functions and the product that follows, by their name in config.json."""

from collections.abc import Callable

import torch

from atom_ops import silu_and_mul_linear

GatedLinear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""([T, 2F], gate beside up; a weight as `linear` takes it; a bias or None) to [T, O]."""

_GATED: dict[str, GatedLinear] = {"silu": silu_and_mul_linear}


def gated_linear(hidden_act: str) -> GatedLinear:
    """Raises ValueError naming what runs."""
    if hidden_act not in _GATED:
        raise ValueError(f"hidden_act {hidden_act} is not supported; these are: {', '.join(_GATED)}")
    return _GATED[hidden_act]
