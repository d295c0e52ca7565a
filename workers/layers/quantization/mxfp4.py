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
from workers.layers.quantization.scheme import Scheme, StoredTensor

GROUP = 32
_CODES_STD = 2.9
"""Standard deviation of random codes."""
_UINT8 = (torch.uint8,)
_FAMILIES = ("gpt_oss",)


def scheme(config: Mapping[str, Any]) -> Scheme:
    """The scheme; the format has no options."""
    blocks = StoredTensor("_blocks", (1, 2), _UINT8, _fill_codes, torch.uint8)
    scales = StoredTensor("_scales", (1, GROUP), _UINT8, _fill_scales, torch.uint8)
    return Scheme("MXFP4", (1, GROUP), (blocks, scales), MXFP4, False, _FAMILIES, linear=False)


def _fill_codes(codes: Tensor, std: float, generator: torch.Generator) -> None:
    codes.random_(0, 256, generator=generator)


def _fill_scales(scales: Tensor, std: float, generator: torch.Generator) -> None:
    scales.fill_(127 + round(math.log2(std / _CODES_STD)))
