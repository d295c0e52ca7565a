"""MXFP4 on an MI350: layouts, and the GEMM of MXFP4 weights and activations that are rounded to MXFP4."""

from inspect import signature

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.aiter_impl.quantized_linear import finished
from atom_ops.aiter_impl.rounding import Rounded, has_mxfp4
from atom_ops.weights import MXFP4, ShuffledMXFP4, Weight

PADDED = 256
"""Sizes of experts are padded to its multiples: the tiles of codes and scales are then whole."""
_SCALED = 32
"""Inputs that share a scale; rows of a tile of scales."""
_ONE = 127
"""The exponent of a scale of 1."""


def reads(weight: MXFP4) -> bool:
    """Whether the GEMMs take a matrix of this size on its device."""
    outputs, inputs = weight.shape[-2:]
    return has_mxfp4(weight.blocks.device) and outputs % _SCALED == 0 and inputs % PADDED == 0


def pack(weight: Weight) -> ShuffledMXFP4 | None:
    """The matrix [O, I] in the layout of the assembly kernels; None for other types and sizes."""
    if not isinstance(weight, MXFP4) or not reads(weight):
        return None
    from aiter.ops.shuffle import shuffle_weight
    from aiter.utility.fp4_utils import e8m0_shuffle

    codes = shuffle_weight(x=weight.blocks.view(torch.float4_e2m1fn_x2), layout=(16, 16))
    scales = e8m0_shuffle(scale=weight.scales).view(torch.float8_e8m0fnu)
    return ShuffledMXFP4(codes, scales, weight.shape)


def shuffled_stack(weight: MXFP4, parts: int, interleaved: bool) -> ShuffledMXFP4:
    """The matrices of experts, padded. `parts`: 2 for gate and up.

    `interleaved`: in the layout that is multiplied by activations of 16 bits.
    """
    from aiter.ops.shuffle import shuffle_scale_a16w4, shuffle_weight, shuffle_weight_a16w4
    from aiter.utility.fp4_utils import e8m0_shuffle

    codes = _padded(weight.blocks, parts, PADDED // 2, 0).view(torch.float4_e2m1fn_x2)
    scales = _padded(weight.scales, parts, PADDED // _SCALED, _ONE)
    flat = scales.flatten(0, 1)
    if interleaved:
        codes = shuffle_weight_a16w4(src=codes, NLane=16, gate_up=parts == 2)
        flat = shuffle_scale_a16w4(src=flat, experts_cnt=len(scales), gate_up=parts == 2)
    else:
        codes = shuffle_weight(x=codes, layout=(16, 16))
        flat = e8m0_shuffle(scale=flat)
    exponents = flat.view(scales.shape).view(torch.float8_e8m0fnu)
    return ShuffledMXFP4(codes, exponents, weight.shape, parts, interleaved and parts == 2)


def multiply(x_TI: Tensor, weight: ShuffledMXFP4, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """x @ weightᵀ + bias, [T, O]. The kernels write x's dtype, which is then converted to `dtype`."""
    from aiter.ops.quant import per_1x32_f4_quant_hip

    if not len(x_TI):
        return x_TI.new_empty(0, weight.shape[0], dtype=dtype)
    rounded = per_1x32_f4_quant_hip(x=x_TI.contiguous(), quant_dtype=torch.float4_e2m1fn_x2, shuffle=True)
    return finished(multiply_rounded(rounded, weight, x_TI.dtype), bias, dtype)


def multiply_plain(x_TI: Tensor, weight: MXFP4, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """The same GEMM by AITER's Triton kernel, with a weight that is not shuffled."""
    from aiter.ops.quant import per_1x32_f4_quant_hip
    from aiter.ops.triton.gemm_afp4wfp4 import gemm_afp4wfp4

    if not len(x_TI):
        return x_TI.new_empty(0, weight.shape[0], dtype=dtype)
    codes, scales = per_1x32_f4_quant_hip(
        x=x_TI.contiguous(), quant_dtype=torch.float4_e2m1fn_x2, shuffle=False
    )
    out_TO: Tensor = gemm_afp4wfp4(
        x=codes.view(torch.uint8),
        w=weight.blocks,
        x_scales=scales.view(torch.uint8),
        w_scales=weight.scales,
        dtype=x_TI.dtype,
    )
    return finished(out_TO, bias, dtype)


def typed(codes: Tensor, scales: Tensor) -> Rounded:
    """Bytes of codes and of scales in tiles, as the Triton kernels write them, in the dtypes of the GEMM."""
    return codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu)


def multiply_rounded(rounded: Rounded, weight: ShuffledMXFP4, dtype: torch.dtype) -> Tensor:
    """GEMM of rounded activations, [T, O] in `dtype`.

    Before 2026 the caller made the result, with its rows padded to a multiple of 32.
    """
    import aiter
    from aiter.ops.gemm_op_a4w4 import gemm_a4w4_fake

    codes, scales = rounded
    tokens = len(codes)
    # The function itself is an op of torch, whose signature Python does not see.
    if "out" not in signature(gemm_a4w4_fake).parameters:
        out_TO: Tensor = aiter.gemm_a4w4(
            A=codes, B=weight.codes, A_scale=scales, B_scale=weight.scales, dtype=dtype, bpreshuffle=True
        )
        return out_TO
    padded_TO = torch.empty(-(-tokens // 32) * 32, weight.shape[0], dtype=dtype, device=codes.device)
    out_TO = aiter.gemm_a4w4(
        A=codes, B=weight.codes, A_scale=scales, B_scale=weight.scales, out=padded_TO, bpreshuffle=True
    )
    return out_TO[:tokens]


def _padded(stack: Tensor, parts: int, columns: int, value: int) -> Tensor:
    """[X, O, C] with each part of O padded to a multiple of `PADDED`, and C to one of `columns`."""
    stack = stack.unflatten(1, (parts, -1))
    rows, width = -stack.shape[2] % PADDED, -stack.shape[3] % columns
    return functional.pad(stack, (0, width, 0, rows), value=value).flatten(1, 2).contiguous()
