"""MXFP4 (OCP microscaling), for single matrices, and as GPT-OSS stores its experts (`quant_method` mxfp4).

                   codes: two in a byte           scales: exponents of 2, plus 127
compressed-tensors weight_packed [O, I / 2]       weight_scale [O, I / 32]
Quark              weight [O, I / 2]              weight_scale [O, I / 32]
DeepSeek-V4        weight [O, I / 2], int8        scale [O, I / 32], e8m0
GPT-OSS            …_blocks [X, O, I / 32, 16]    …_scales [X, O, I / 32]
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from atom_ops import MXFP4
from workers.layers.quantization.fills import fill_bytes
from workers.layers.quantization.rules import Rules, as_written, excluded
from workers.layers.quantization.scheme import Matrix, Scheme, StoredTensor

GROUP = 32
_CODES_STD = 2.9
"""Standard deviation of random codes."""
_UINT8 = (torch.uint8,)


def rules(stated: Mapping[str, Any]) -> Rules:
    """All routed experts, but for modules_to_not_convert; the format has no options."""
    return Rules(_GPT_OSS, excluded(stated, ("modules_to_not_convert", "ignored_layers"), as_written))


def _fill_scales(scales: Tensor, std: float, generator: torch.Generator) -> None:
    scales.fill_(127 + round(math.log2(std / _CODES_STD)))


def _bytes(exponents: Tensor, matrix: Matrix) -> Tensor:
    return exponents.view(torch.uint8)


@cache
def mxfp4(codes: str, scale: str = "weight_scale") -> Scheme:
    """Single matrices, whose codes and scales have these names.

    Activations are not rounded, whatever the config says.
    """
    return Scheme(
        "MXFP4",
        (1, GROUP),
        (
            # Copied to uint8, an int8 keeps its bits.
            StoredTensor("_codes", (1, 2), (*_UINT8, torch.int8), fill_bytes, torch.uint8, names=(codes,)),
            StoredTensor(
                "_scales",
                (1, GROUP),
                (*_UINT8, torch.float8_e8m0fnu),
                _fill_scales,
                torch.uint8,
                names=(scale,),
                decode=_bytes,
            ),
        ),
        MXFP4,
        ragged=False,
    )


_GPT_OSS = Scheme(
    "MXFP4",
    (1, GROUP),
    (
        StoredTensor("_blocks", (1, 2), _UINT8, fill_bytes, torch.uint8),
        StoredTensor("_scales", (1, GROUP), _UINT8, _fill_scales, torch.uint8),
    ),
    MXFP4,
    ragged=False,
    families=("gpt_oss",),
    linear=False,
)
