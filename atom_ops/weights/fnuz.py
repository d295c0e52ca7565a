"""e4m3fnuz, the 8-bit float of the matrix instructions of MI300 (gfx942); checkpoints hold e4m3fn.

The same bits are worth half as much: the exponent's bias is 8 instead of 7. So the bits stay, and scales
double. Bits 0x80, -0 in e4m3fn, are NaN in e4m3fnuz and become 0. The NaN of e4m3fn, 0x7f and 0xff, would
become numbers.
"""

from dataclasses import replace

import torch
from torch import Tensor

from atom_ops.weights.block_fp8 import BlockFP8
from atom_ops.weights.channel_fp8 import ChannelFP8


def as_fnuz(weight: BlockFP8 | ChannelFP8) -> BlockFP8 | ChannelFP8:
    """The same numbers in e4m3fnuz, for a provider's `pack`; the scale of inputs doubles as well.

    Raises ValueError for a weight with NaN. Synchronises with a GPU. A meta tensor is not checked.
    """
    values = fnuz_values(weight.values)
    scales = 2 * weight.scales
    if isinstance(weight, BlockFP8):
        return replace(weight, values=values, scales=scales)
    inputs = None if weight.input_scale is None else 2 * weight.input_scale
    return replace(weight, values=values, scales=scales, input_scale=inputs)


def fnuz_values(values: Tensor) -> Tensor:
    """The halves of e4m3fn values, as e4m3fnuz. Raises ValueError for NaN."""
    bits = values.view(torch.uint8)
    if not bits.is_meta and (bits & 0x7F == 0x7F).any():
        raise ValueError("a weight of 8-bit floats has NaN, which e4m3fnuz stores otherwise")
    return bits.where(bits != 0x80, 0).view(torch.float8_e4m3fnuz)
