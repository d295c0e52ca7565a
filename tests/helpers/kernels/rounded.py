"""torch's `linear` with activations that are rounded as AITER's kernels round them; nothing else is theirs.

Sums are in float64, so that two orders of summation give the same number, which rounds to the same code.
"""

import torch
from torch import Tensor

from atom_ops.ops.linear.linear import linear
from atom_ops.weights import MXFP4, BlockFP8, ChannelFP8, ChannelINT8, Weight
from tests.aiter_contract import machine, mxfp4, rounding


def rounded_linear(round_mxfp4: bool = True) -> object:
    """Replaces `linear.reference`, and so the GEMMs of the reference of `experts`."""
    plain = linear.reference

    def multiply(
        x_TI: Tensor, weight: Weight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if not isinstance(weight, BlockFP8 | ChannelFP8 | ChannelINT8 | MXFP4) or x_TI.shape[1] % 32:
            return plain(x_TI, weight, bias, out_dtype)
        numbers = weight.dequantized(torch.float32).double()
        rows = x_TI.float() if isinstance(weight, MXFP4) and not round_mxfp4 else _rounded(x_TI, weight)
        out = (rows.double() @ numbers.T).to(x_TI.dtype)
        out = out if bias is None else out + bias
        return out if out_dtype is None else out.to(out_dtype)

    return multiply


def _rounded(x: Tensor, weight: BlockFP8 | ChannelFP8 | ChannelINT8 | MXFP4) -> Tensor:
    if isinstance(weight, MXFP4):
        return mxfp4.rounded(x)
    dtype = torch.int8 if isinstance(weight, ChannelINT8) else machine.fp8()
    group = 128 if isinstance(weight, BlockFP8) and x.shape[1] % 128 == 0 else x.shape[1]
    if isinstance(weight, ChannelFP8) and weight.input_scale is not None:
        scale = weight.input_scale * (2 if dtype == torch.float8_e4m3fnuz else 1)
        return rounding.cast(x.float() / scale, dtype).float() * scale
    if isinstance(weight, ChannelFP8) and weight.input_bound is not None:
        x = x.clamp(-weight.input_bound, weight.input_bound)
    values, scales = rounding.by_group(x, dtype, group)
    return values.float() * scales.repeat_interleave(group, 1)
