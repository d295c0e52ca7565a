"""The closed union of weight types, and what works on all of them."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from atom_ops.weights.block_fp8 import BlockFP8
from atom_ops.weights.channel_fp8 import ChannelFP8
from atom_ops.weights.channel_int8 import ChannelINT8
from atom_ops.weights.group_int4 import GroupINT4
from atom_ops.weights.mxfp4 import MXFP4

_TILE_NUMBERS = 1 << 22
"""Numbers that a reference dequantizes at once."""


@dataclass(frozen=True, slots=True)
class PackedOneDNN:
    """A plain matrix in the layout of oneDNN, which only its own provider reads."""

    tensor: Tensor
    shape: tuple[int, ...]


Quantized = BlockFP8 | ChannelFP8 | ChannelINT8 | GroupINT4 | MXFP4
Weight = Tensor | PackedOneDNN | Quantized
"""A matrix that ops multiply by; a Tensor is plain, in the dtype of the activations."""


def dequantized_tiles(weight: Quantized, dtype: torch.dtype) -> Iterator[Tensor]:
    """All rows of [O, I] in order, as plain matrices of whole blocks."""
    outputs, inputs = weight.shape
    each = max(_TILE_NUMBERS // max(inputs, 1) // weight.row_unit, 1) * weight.row_unit
    for start in range(0, outputs, each):
        yield weight.rows(start, min(start + each, outputs)).dequantized(dtype)


def tensors_of(weight: Weight) -> Iterator[Tensor]:
    """The tensors that a weight holds in memory."""
    if isinstance(weight, Tensor):
        yield weight
        return
    for field in fields(weight):
        if isinstance(part := getattr(weight, field.name), Tensor):
            yield part
