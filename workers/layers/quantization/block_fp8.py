"""FP8 in blocks, the format of DeepSeek V3 and of Qwen3's FP8 checkpoints.

    weight             [O, I]                          e4m3
    weight_scale_inv   [ceil(O / 128), ceil(I / 128)]  weight[o, i] * weight_scale_inv[o // 128, i // 128]

Despite its name the scale is multiplied by. compressed-tensors and modelopt call it weight_scale, DeepSeek-V4
scale.
"""

from functools import cache

import torch
from torch import Tensor

from atom_ops import BlockFP8
from workers.layers.quantization.fills import constant_fill, fill_codes
from workers.layers.quantization.scheme import FLOATS, Matrix, Scheme, StoredTensor

CODES_STD = 100.0
"""Standard deviation of random codes: far from both ends of e4m3."""
_SCALE = "weight_scale_inv"
_LARGEST_BLOCK = 4096
"""Scales are repeated for all rows of a block where it is dequantized."""
CODES = StoredTensor(
    "", (1, 1), (torch.float8_e4m3fn,), fill_codes(CODES_STD), torch.float8_e4m3fn, stacked=""
)
SCALE_DTYPES = (*FLOATS, torch.float8_e8m0fnu, torch.uint8)


@cache
def block_fp8(rows: int, columns: int, *scale: str) -> Scheme:
    """Blocks of that many outputs and inputs; `scale` are possible names of the scales in the checkpoint."""
    name = f"FP8 in blocks of {rows} x {columns}"
    names = scale or (_SCALE,)
    scales = StoredTensor(
        "_scales", (rows, columns), SCALE_DTYPES, constant_fill(CODES_STD), torch.float32,
        names=names,
        disk_shapes=lambda matrix: _shapes(matrix, rows, columns),
        decode=lambda tensor, matrix: _scales(tensor, matrix, rows, columns),
        stacked="_scale_inv" if _SCALE in names else None,
    )  # fmt: skip
    block = (rows, columns)
    return Scheme(name, block, (CODES, scales), lambda values, scales: BlockFP8(values, scales, block))


def block_of(block: object, key: str) -> tuple[int, int]:
    """The outputs and inputs of a block, from a config. Raises ValueError for other values."""
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise ValueError(f"{key} {block!r:.40}, which is not two positive numbers")
    if max(block) > _LARGEST_BLOCK:
        raise ValueError(f"{key} {block!r:.40}; supported: up to {_LARGEST_BLOCK}")
    return block[0], block[1]


def _shapes(matrix: Matrix, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """As [ceil(O / N), ceil(I / K)], or, by modelopt, with an axis of 1 after each of them."""
    down = -(-matrix[0] // rows)
    across = -(-matrix[1] // columns)
    return (down, across), (down, 1, across, 1)


def _scales(tensor: Tensor, matrix: Matrix, rows: int, columns: int) -> Tensor:
    return powers_of_bytes(tensor).reshape(_shapes(matrix, rows, columns)[0])


def powers_of_bytes(scales: Tensor) -> Tensor:
    """Scales in bytes are exponents of 2 plus 127 (e8m0)."""
    return scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
