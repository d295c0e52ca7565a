"""Activation functions of gated MLPs, fused with the down projection, by their name in config.json."""

from collections.abc import Callable

import torch

from atom_ops import Weight, linear, silu_and_mul, silu_and_mul_linear

GatedLinear = Callable[[torch.Tensor, Weight, torch.Tensor | None], torch.Tensor]
"""Maps [T, 2F] (gate beside up), the weight and the bias of a linear layer to [T, O]."""


def _silu_and_mul_then_linear(x_T2F: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(silu_and_mul(x_T2F), weight, bias)


_FUSED: dict[str, GatedLinear] = {"silu": silu_and_mul_linear}
_SEPARATE: dict[str, GatedLinear] = {"silu": _silu_and_mul_then_linear}


def gated_linear(hidden_act: str, fused: bool = True) -> GatedLinear:
    """The function for that activation. Raises ValueError that lists the supported ones.

    `fused`: the activation and the quantization of its output may be one kernel.
    """
    if hidden_act not in _FUSED:
        raise ValueError(f"hidden_act {hidden_act} is not supported; supported are: {', '.join(_FUSED)}")
    return (_FUSED if fused else _SEPARATE)[hidden_act]
