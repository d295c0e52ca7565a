"""GEMM of weights in 8 bits and of activations that are rounded to 8 bits.

BlockFP8      gemm_a8w8_blockscale_bpreshuffle, or gemm_a8w8_blockscale where there are no whole tiles
ChannelFP8    gemm_a8w8_bpreshuffle
ChannelINT8   gemm_a8w8
"""

from dataclasses import replace

import torch
from torch import Tensor

from atom_ops.aiter_impl.rounding import GROUP, Rounded, fp8_dtype, round_rows
from atom_ops.weights import BlockFP8, ChannelFP8, ChannelINT8, ShuffledFP8, Weight
from atom_ops.weights.fnuz import as_fnuz
from atom_ops.weights.shuffled import TILE

EightBits = ShuffledFP8 | BlockFP8 | ChannelINT8
_BLOCK = (GROUP, GROUP)
_WRITTEN = 8
"""Outputs that a thread writes at once."""
_READ = 16
"""Bytes of a row that a thread reads at once."""


def pack(weight: Weight) -> ShuffledFP8 | BlockFP8 | None:
    """An FP8 weight in the layout that the kernels read; None for other types and sizes."""
    if not isinstance(weight, BlockFP8 | ChannelFP8) or not _fits(weight):
        return None
    if has_tiles(weight):
        return shuffled(weight)
    moved = _on_device(weight)
    return moved if isinstance(moved, BlockFP8) else None


def shuffled(weight: BlockFP8 | ChannelFP8) -> ShuffledFP8:
    """The weight in tiles, in the 8-bit float of its device. Raises ValueError for NaN, see `as_fnuz`."""
    from aiter.ops.shuffle import shuffle_weight

    weight = _on_device(weight)
    tiles = shuffle_weight(x=weight.values.contiguous(), layout=(16, 16))
    return ShuffledFP8(replace(weight, values=tiles))


def has_tiles(weight: BlockFP8 | ChannelFP8) -> bool:
    """Whether its matrices consist of whole tiles."""
    return weight.shape[-2] % TILE[0] == weight.shape[-1] % TILE[1] == 0


def has_blocks(weight: BlockFP8) -> bool:
    """Whether its blocks are those of the kernels, with whole groups of inputs."""
    return weight.block == _BLOCK and weight.shape[-1] % GROUP == 0


def reads(weight: Weight) -> bool:
    """Whether `multiply` takes the weight."""
    if isinstance(weight, ChannelINT8):
        return weight.shape[0] % _WRITTEN == weight.shape[1] % _READ == 0
    if isinstance(weight, BlockFP8):
        return weight.values.dtype == fp8_dtype(weight.values.device) and _fits(weight)
    return isinstance(weight, ShuffledFP8)


def multiply(x_TI: Tensor, weight: EightBits, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """x @ weightᵀ + bias, [T, O]. The kernels write x's dtype, which is then converted to `dtype`."""
    if not len(x_TI):
        return x_TI.new_empty(0, weight.shape[0], dtype=dtype)
    return finished(multiply_rounded(round_rows(x_TI, *form(weight)), weight, x_TI.dtype), bias, dtype)


def finished(out_TO: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """The GEMM's result plus the bias, which some of the kernels would leave out."""
    if bias is not None:
        out_TO += bias
    return out_TO if dtype is None else out_TO.to(dtype)


def form(weight: EightBits) -> tuple[BlockFP8 | ChannelFP8 | ChannelINT8, bool]:
    """The weight, and whether activations have their scales column by column: as `round_rows` takes them."""
    return (weight.weight, True) if isinstance(weight, ShuffledFP8) else (weight, False)


def multiply_rounded(rounded: Rounded, weight: EightBits, dtype: torch.dtype) -> Tensor:
    """GEMM of activations that are rounded as `form` says, [T, O] in `dtype`."""
    import aiter

    x_TI, scales = rounded
    plain = form(weight)[0]
    if isinstance(plain, BlockFP8) and isinstance(weight, ShuffledFP8):
        out_TO: Tensor = aiter.gemm_a8w8_blockscale_bpreshuffle(
            XQ=x_TI, WQ=plain.values, x_scale=scales, w_scale=plain.scales, dtype=dtype
        )
    elif isinstance(plain, BlockFP8):
        out_TO = aiter.gemm_a8w8_blockscale(
            XQ=x_TI, WQ=plain.values, x_scale=scales, w_scale=plain.scales, dtype=dtype
        )
    elif isinstance(plain, ChannelFP8):
        scales_O1 = plain.scales.unsqueeze(1)
        out_TO = aiter.gemm_a8w8_bpreshuffle(
            XQ=x_TI, WQ=plain.values, x_scale=scales, w_scale=scales_O1, dtype=dtype
        )
    else:
        scales_O1 = plain.scales.unsqueeze(1)
        out_TO = aiter.gemm_a8w8(XQ=x_TI, WQ=plain.values, x_scale=scales, w_scale=scales_O1, dtype=dtype)
    return out_TO


def _fits(weight: BlockFP8 | ChannelFP8) -> bool:
    if isinstance(weight, ChannelFP8):
        return has_tiles(weight)
    return has_blocks(weight) and weight.shape[-2] % _WRITTEN == 0


def _on_device(weight: BlockFP8 | ChannelFP8) -> BlockFP8 | ChannelFP8:
    """The weight in the 8-bit float of its device."""
    return as_fnuz(weight) if fp8_dtype(weight.values.device) == torch.float8_e4m3fnuz else weight
