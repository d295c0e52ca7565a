"""Random weights of every type, for the cases of the ops."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from atom_ops.tolerances import FP8_ACTIVATIONS, INT8_ACTIVATIONS, INT16_ACTIVATIONS, Tolerances
from atom_ops.weights.affine_ints import AffineInts
from atom_ops.weights.block_fp8 import BlockFP8
from atom_ops.weights.channel_fp8 import ChannelFP8
from atom_ops.weights.channel_int8 import ChannelINT8
from atom_ops.weights.group_int4 import GroupINT4
from atom_ops.weights.mxfp4 import MXFP4
from atom_ops.weights.types import Weight

Format = Literal[
    "plain", "block_fp8", "channel_fp8", "static_fp8", "channel_int8",
    "int4_32", "int4_64", "int4_128", "int4_32_zeros", "int4_128_zeros", "int4_channel", "mxfp4",
    "affine_int4_32", "affine_int4_32_offsets", "affine_int6_16", "affine_int6_16_offsets_units",
    "affine_int8_16", "affine_int8_32_offsets",
]  # fmt: skip
"""`static_fp8` has a scale for the inputs; `…int4_…`: inputs of a group, and whether it has zero points or
offsets, and integer scales with units."""

ROUNDED: dict[Format, Tolerances] = {
    **{name: INT16_ACTIVATIONS for name in get_args(Format) if name.startswith(("int4", "affine"))},
    "block_fp8": FP8_ACTIVATIONS,
    "channel_fp8": FP8_ACTIVATIONS,
    "static_fp8": FP8_ACTIVATIONS,
    "channel_int8": INT8_ACTIVATIONS,
}
"""Tolerances of kernels that round the activations, in the formats where kernels may."""


def random_weight(
    shape: tuple[int, ...], format: Format, dtype: torch.dtype, generator: torch.Generator
) -> Weight:
    """A weight [..., O, I] for tests, with a variance of about 1 / I."""
    std = shape[-1] ** -0.5
    if format == "plain":
        return (torch.randn(*shape, generator=generator) * std).to(dtype)
    if format == "channel_int8":
        codes = torch.randn(*shape, generator=generator).mul_(30).round_().clamp_(-127, 127)
        return ChannelINT8(codes.to(torch.int8), _scales(shape[:-1], std / 30, generator))
    if format == "mxfp4":
        return _mxfp4(shape, std, generator)
    if format.startswith("int4"):
        return _int4(shape, format, dtype, generator)
    if format.startswith("affine"):
        return _affine(shape, format, generator)
    return _fp8(shape, format, generator)


_STD_OF_INTS = {"int4": 4.6, "int6": 12, "int8": 30}


def _scales(shape: tuple[int, ...], mean: float, generator: torch.Generator) -> Tensor:
    return (0.5 + torch.rand(*shape, generator=generator)) * mean


def _fp8(shape: tuple[int, ...], format: Format, generator: torch.Generator) -> Weight:
    values = torch.randn(*shape, generator=generator).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    mean = shape[-1] ** -0.5 / 100
    if format == "block_fp8":
        blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        return BlockFP8(values, _scales(blocks, mean, generator), (128, 128))
    scales = _scales(shape[:-1], mean, generator)
    # Inputs of a standard deviation of 1 are below 6.
    return ChannelFP8(values, scales, torch.full(shape[:-2], 6 / 448) if format == "static_fp8" else None)


def _int4(shape: tuple[int, ...], format: Format, dtype: torch.dtype, generator: torch.Generator) -> Weight:
    name = format.split("_")[1]
    with_zeros = format.endswith("zeros")
    group = shape[-1] if name == "channel" else int(name)
    groups = (*shape[:-1], shape[-1] // group)
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator).to(torch.uint8)
    scales = _scales(groups, shape[-1] ** -0.5 / 4.6, generator)  # a standard deviation of random codes
    zeros = torch.randint(6, 11, groups, generator=generator).to(torch.uint8) if with_zeros else None
    return GroupINT4(codes, scales.bfloat16().to(dtype), zeros)  # checkpoints have scales of 16 bits


def _affine(shape: tuple[int, ...], format: Format, generator: torch.Generator) -> Weight:
    name, group = format.split("_")[1:3]
    groups = (*shape[:-1], shape[-1] // int(group))
    if name == "int4":
        codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator).to(torch.uint8)
    else:
        codes = torch.randn(*shape, generator=generator).mul_(_STD_OF_INTS[name]).round_()
        codes = codes.clamp_(*(-32, 31) if name == "int6" else (-127, 127)).to(torch.int8)
    std = shape[-1] ** -0.5
    scales = _scales(groups, std / _STD_OF_INTS[name], generator).half()
    offsets = (torch.randn(groups, generator=generator) * std).half()
    if name == "int4":
        offsets -= 8 * scales
    added = offsets.float() if "offsets" in format else None
    if not format.endswith("units"):
        return AffineInts(codes, scales.float(), added, narrow=name == "int6")
    first, second = (torch.randint(1, 64, groups, generator=generator).to(torch.int8) for _ in range(2))
    return AffineInts(codes, first, second, scales / 32, scales / -32, name == "int6")


def _mxfp4(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Weight:
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator).to(torch.uint8)
    exponent = 127 + round(math.log2(std / 3))  # random codes have a standard deviation of 3
    exponents = torch.randint(exponent - 1, exponent + 1, (*shape[:-1], shape[-1] // 32), generator=generator)
    return MXFP4(codes, exponents.to(torch.uint8))
