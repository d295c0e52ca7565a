"""Providers of `linear` for quantized weights on a CPU: torch's kernels for INT4 and INT8.

They read the packed weight, which at few tokens is several times as fast as a bfloat16 matmul. For other
dtypes of the activations torch's kernels are slower than multiplying by dequantized numbers.
"""

import torch
from torch import Tensor

from atom_ops.ops.linear.linear import linear
from atom_ops.weights import ChannelINT8, GroupINT4, PackedINT4, Weight

_ROWS = 16
_GROUPS = (32, 64, 128, 256)
_INPUTS = 32
"""torch's kernel for INT8 reads so many at once, also beyond the end of a row."""
_ZERO = 8
"""The code that torch's kernel reads as 0."""


def _fits_int8(weight: Weight) -> bool:
    return isinstance(weight, ChannelINT8) and len(weight.shape) == 2 and weight.shape[1] % _INPUTS == 0


def _fits_int4(weight: Weight) -> bool:
    return (
        isinstance(weight, GroupINT4)
        and len(weight.shape) == 2
        and weight.shape[0] % _ROWS == 0
        and weight.group in _GROUPS
        and weight.scales.dtype == torch.bfloat16
    )


def _pack_int4(weight: Weight) -> PackedINT4 | None:
    if not isinstance(weight, GroupINT4) or not _fits_int4(weight):
        return None
    zeros = torch.full_like(weight.scales, _ZERO) if weight.zeros is None else weight.zeros.float()
    offsets = (weight.scales.float() * (_ZERO - zeros)).to(weight.scales.dtype)
    terms = torch.stack((weight.scales.t(), offsets.t()), -1).contiguous()
    if weight.codes.is_meta:  # a plan of the memory: the size stays the same
        return PackedINT4(weight.codes, terms, weight.group, weight.shape)
    numbers = torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(-2).int()
    codes: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    return PackedINT4(codes, terms, weight.group, weight.shape)


@linear.provider(
    "cpu_int4",
    needs="a CPU",
    supported=lambda device: device.type == "cpu",
    supports=lambda x_TI, weight, bias=None, out_dtype=None: (
        isinstance(weight, PackedINT4) and x_TI.dtype == weight.scales.dtype
    ),
    prepare=lambda x_TI, weight, bias=None, out_dtype=None: (
        x_TI,
        _pack_int4(weight) or weight,
        bias,
        out_dtype,
    ),
    pack=_pack_int4,
    batch_invariant=False,
)
def _cpu_int4(
    x_TI: Tensor, weight: PackedINT4, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Scales and zero points are rounded to bfloat16; sums are float32, and rounded once."""
    x_TI = x_TI.contiguous()  # the kernel takes no others
    out_TO = torch.ops.aten._weight_int4pack_mm_for_cpu(x_TI, weight.codes, weight.group, weight.scales)
    return _finished(out_TO, bias, out_dtype)


@linear.provider(
    "cpu_int8",
    needs="a CPU",
    supported=lambda device: device.type == "cpu",
    supports=lambda x_TI, weight, bias=None, out_dtype=None: (
        x_TI.dtype == torch.bfloat16 and _fits_int8(weight)
    ),
)
def _cpu_int8(
    x_TI: Tensor, weight: ChannelINT8, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Activations are not rounded; scales are, to bfloat16."""
    out_TO = torch.ops.aten._weight_int8pack_mm(x_TI, weight.values, weight.scales.to(x_TI.dtype))
    return _finished(out_TO, bias, out_dtype)


def _finished(out_TO: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    if bias is not None:
        out_TO = out_TO + bias
    return out_TO if out_dtype is None else out_TO.to(out_dtype)
