"""Activations in 8 bits, as AITER's GEMMs for quantized weights take them."""

import torch
from torch import Tensor

from atom_ops import aiter_impl
from atom_ops.weights import BlockFP8, ChannelFP8, ChannelINT8

GROUP = 128
"""Inputs that share a scale, where the weight has blocks."""

Rounded = tuple[Tensor, Tensor]
"""Values [T, I] and float32 scales: [T, 1], or [T, I / 128] of groups. MXFP4: codes and scales in tiles."""


def fp8_dtype(device: torch.device) -> torch.dtype:
    """The 8-bit float of the GPU's matrix instructions; `device` is that of a weight."""
    return torch.float8_e4m3fnuz if _architecture(device) == "gfx942" else torch.float8_e4m3fn


def has_mxfp4(device: torch.device) -> bool:
    """Whether the GPU multiplies 4-bit floats; `device` is that of a weight."""
    return _architecture(device) == "gfx950"


def _architecture(device: torch.device) -> str:
    """Weights on the meta device plan the memory of those on the GPU."""
    return aiter_impl.architecture(torch.device("cuda") if device.type == "meta" else device)


def round_rows(x_TI: Tensor, weight: BlockFP8 | ChannelFP8 | ChannelINT8, by_column: bool) -> Rounded:
    """The activations in the dtype of the weight's values, with scales as the weight's type wants them.

    `by_column`: scales of groups are stored column after column, though their shape stays [T, I / 128].
    """
    from aiter.ops.quant import per_group_quant_hip, per_tensor_quant_hip, per_token_quant_hip

    x_TI = x_TI.contiguous()
    dtype = weight.values.dtype
    if isinstance(weight, BlockFP8):
        by_group: Rounded = per_group_quant_hip(
            x=x_TI, quant_dtype=dtype, group_size=GROUP, transpose_scale=by_column
        )
        return by_group
    if isinstance(weight, ChannelFP8) and weight.input_scale is not None:
        scale_1 = weight.input_scale.reshape(1)
        values, scale_1 = per_tensor_quant_hip(x=x_TI, scale=scale_1, quant_dtype=dtype)
        return values, scale_1.expand(len(x_TI), 1).contiguous()
    if isinstance(weight, ChannelFP8) and weight.input_bound is not None:
        x_TI = x_TI.clamp(-weight.input_bound, weight.input_bound)  # bounds the scale of a token
    by_token: Rounded = per_token_quant_hip(x=x_TI, quant_dtype=dtype)
    return by_token
