"""MXFP4 (OCP microscaling), as GPT-OSS stores its experts (`quant_method` mxfp4); all else is plain.

…_blocks   [X, O, I / 32, 16]   two 4-bit floats in each byte
…_scales   [X, O, I / 32]       exponents of 2, plus 127
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from atom_ops import MXFP4
from workers.layers.quantization.rules import Rules, as_written, excluded
from workers.layers.quantization.scheme import Scheme, StoredTensor

GROUP = 32
_CODES_STD = 2.9
"""Standard deviation of random codes."""
_UINT8 = (torch.uint8,)


def rules(stated: Mapping[str, Any]) -> Rules:
    """All routed experts, but for modules_to_not_convert; the format has no options."""
    return Rules(_GPT_OSS, excluded(stated, ("modules_to_not_convert", "ignored_layers"), as_written))


def _fill_codes(codes: Tensor, std: float, generator: torch.Generator) -> None:
    codes.random_(0, 256, generator=generator)


def _fill_scales(scales: Tensor, std: float, generator: torch.Generator) -> None:
    scales.fill_(127 + round(math.log2(std / _CODES_STD)))


_GPT_OSS = Scheme(
    "MXFP4",
    (1, GROUP),
    (
        StoredTensor("_blocks", (1, 2), _UINT8, _fill_codes, torch.uint8),
        StoredTensor("_scales", (1, GROUP), _UINT8, _fill_scales, torch.uint8),
    ),
    MXFP4,
    ragged=False,
    families=("gpt_oss",),
    linear=False,
)
