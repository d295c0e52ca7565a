"""FP8 in blocks, the format of DeepSeek V3 and of Qwen3's FP8 checkpoints (`quant_method` fp8).

    weight             [O, I]                        e4m3
    weight_scale_inv   [ceil(O / 128), ceil(I / 128)]  weight[o, i] * weight_scale_inv[o // 128, i // 128]

Despite its name the scale is multiplied by.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from atom_ops import BlockFP8
from workers.layers.quantization.scheme import FLOATS, Scheme, StoredTensor

_CODES_STD = 100.0
"""Standard deviation of random codes: far from both ends of e4m3."""
_FILLED_AT_ONCE = 1 << 22


def scheme(config: Mapping[str, Any]) -> Scheme:
    """The scheme for this `quantization_config`. Raises ValueError for variants of other kinds."""
    block = config.get("weight_block_size")
    if block is None:
        raise ValueError("one scale for each tensor (weight_block_size is not set)")
    sizes = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not sizes:
        raise ValueError(f"weight_block_size {block!r:.40}, which is not two positive numbers")
    for name, supported in (("activation_scheme", "dynamic"), ("fmt", "e4m3")):
        if config.get(name, supported) != supported:
            raise ValueError(f"{name} {config[name]!r:.40}; supported: {supported}")
    rows, columns = block
    codes = StoredTensor("", (1, 1), (torch.float8_e4m3fn,), _fill_codes, torch.float8_e4m3fn)
    on_disk = (*FLOATS, torch.float8_e8m0fnu)
    scales = StoredTensor("_scale_inv", (rows, columns), on_disk, _fill_scales, torch.float32)
    return Scheme(
        f"FP8 in blocks of {rows} x {columns}",
        (rows, columns),
        (codes, scales),
        lambda values, scales: BlockFP8(values, scales, (rows, columns)),
    )


def _fill_codes(codes: Tensor, std: float, generator: torch.Generator) -> None:
    bound = 3**0.5 * _CODES_STD
    for part in codes.flatten().split(_FILLED_AT_ONCE):  # float8 has no random numbers of its own
        part.copy_(torch.empty_like(part, dtype=torch.float32).uniform_(-bound, bound, generator=generator))


def _fill_scales(scales: Tensor, std: float, generator: torch.Generator) -> None:
    scales.fill_(std / _CODES_STD)
