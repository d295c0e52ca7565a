"""Random numbers for the tensors of quantized weights, made where the weights are."""

import torch
from torch import Tensor

from workers.layers.quantization.scheme import Fill

_FILLED_AT_ONCE = 1 << 24
"""Numbers that are in memory in float32: 64 MiB."""


def fill_codes(std: float) -> Fill:
    """Codes of 8 bits with that standard deviation, integers or floats."""

    def fill(codes: Tensor, _: float, generator: torch.Generator) -> None:
        bound = 3**0.5 * std
        for part in codes.flatten().split(_FILLED_AT_ONCE):  # float8 has no random numbers of its own
            numbers = torch.empty_like(part, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
            part.copy_(numbers)

    return fill


def fill_bytes(codes: Tensor, std: float, generator: torch.Generator) -> None:
    """Two codes of 4 bits in each byte."""
    codes.random_(0, 256, generator=generator)


def constant_fill(codes_std: float) -> Fill:
    """Scales for codes of that standard deviation."""

    def fill(scales: Tensor, std: float, generator: torch.Generator) -> None:
        scales.fill_(std / codes_std)

    return fill


def fill_input_scales(scales: Tensor, std: float, generator: torch.Generator) -> None:
    """Inputs up to 28 become e4m3."""
    scales.fill_(1 / 16)
