"""Activation functions of gated MLPs, by their name in config.json."""

from collections.abc import Callable

import torch

from atom_ops import silu_and_mul

Activation = Callable[[torch.Tensor], torch.Tensor]
"""[T, 2F], gate beside up, to [T, F]."""

_GATED: dict[str, Activation] = {"silu": silu_and_mul}


def gated_activation(hidden_act: str) -> Activation:
    """Raises ValueError naming what runs."""
    if hidden_act not in _GATED:
        raise ValueError(f"hidden_act {hidden_act} is not supported; these are: {', '.join(_GATED)}")
    return _GATED[hidden_act]
