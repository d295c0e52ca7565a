"""GEMMs of the vendor's library for quantized weights: torch._scaled_mm of FP8, decoded 4 bits."""

from functools import cache

import torch
from torch import Tensor

from atom_ops.ops.linear.linear import linear
from atom_ops.triton_impl.hardware.target import is_hopper
from atom_ops.triton_impl.quantized import four_bit_linear
from atom_ops.triton_impl.quantized.rounded_rows import RoundedRows
from atom_ops.weights import BlockFP8, ChannelFP8, FourBitWords

TILE = 16
"""Tokens of a tile of torch._scaled_mm."""
_BLOCK = 128
_DECODED_NUMBERS = 1 << 28


def multiplies(weight: BlockFP8 | ChannelFP8) -> bool:
    """Whether torch._scaled_mm multiplies by this type of weight."""
    return _scales_blocks(weight.scales.device, isinstance(weight, BlockFP8))


@cache
def _scales_blocks(device: torch.device, blocks: bool) -> bool:
    """Blocks need Hopper and cuBLAS of CUDA 12.9."""
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return not blocks or (is_hopper(device) and version >= (12, 9))


def scaled_mm(rows: RoundedRows, tokens: int, weight: BlockFP8 | ChannelFP8, bias: Tensor | None) -> Tensor:
    """[T, O] in bfloat16, by cuBLAS or CUTLASS."""
    blocks = isinstance(weight, BlockFP8)
    scales = (rows.scales.t(), weight.scales.t()) if blocks else (rows.scales[:, None], weight.scales[None])
    out_TO: Tensor = torch._scaled_mm(
        rows.values, weight.values.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=not blocks
    )
    out_TO = out_TO[:tokens]
    return out_TO if bias is None else out_TO + bias


def decoded(x_TI: Tensor, weight: FourBitWords, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A plain GEMM with the weight decoded, a part of its rows at a time, to bound the memory."""
    outputs, inputs = weight.shape
    each = max(_DECODED_NUMBERS // inputs // _BLOCK, 1) * _BLOCK
    if each >= outputs:
        return linear(x_TI, four_bit_linear.dequantized(weight, x_TI.dtype), bias, dtype)
    out_TO = torch.empty(len(x_TI), outputs, dtype=dtype, device=x_TI.device)
    for start in range(0, outputs, each):
        stop = min(start + each, outputs)
        part = four_bit_linear.dequantized(weight.rows(start, stop), x_TI.dtype)
        out_TO[:, start:stop] = linear(x_TI, part, None if bias is None else bias[start:stop], dtype)
    return out_TO
