"""Linear layers with weights of bfloat16 numbers; in a float32 model they then take half the memory."""

import torch
from torch import Tensor

from atom_ops.native_impl import NEEDS, call, has, runs_on
from atom_ops.native_impl.build import library
from atom_ops.ops.linear import linear, with_packed_weight
from atom_ops.weights import PackedPanels, Weight

_ROUNDED_OFF = 0xFFFF
"""The bits of float32 that bfloat16 lacks."""
_AT_ONCE = 1 << 16
"""Numbers that are looked at together."""


def fits(x_TI: Tensor, weight: PackedPanels, bias: Tensor | None, parts: int = 1) -> bool:
    """Whether the kernels can multiply them; x has the inputs of so many parts side by side."""
    dtype, (outputs, inputs) = weight.dtype, weight.shape
    if x_TI.dtype != dtype or x_TI.ndim != 2 or x_TI.shape[1] != parts * inputs or not x_TI.is_contiguous():
        return False
    return bias is None or (bias.dtype == dtype and bias.shape == (outputs,) and bias.is_contiguous())


def _pack(weight: Weight) -> PackedPanels | None:
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[1] % 2 or not _is_exact(weight):
        return None
    outputs, inputs = weight.shape
    lanes = library().atom_lanes()
    panels, whole = -(-outputs // lanes), outputs // lanes
    tensor = weight.new_zeros(panels, inputs // 2, lanes, 2, dtype=torch.bfloat16)
    pairs = weight.unflatten(1, (-1, 2))
    tensor[:whole] = pairs[: whole * lanes].unflatten(0, (-1, lanes)).transpose(1, 2)
    if panels > whole:
        tensor[whole, :, : outputs % lanes] = pairs[whole * lanes :].transpose(0, 1)
    return PackedPanels(tensor, (outputs, inputs), weight.dtype)


def _is_exact(weight: Tensor) -> bool:
    """Whether there is a kernel for its dtype, and all its numbers are of bfloat16."""
    if weight.dtype == torch.float32 and not weight.is_meta:  # a plan of the memory knows no numbers
        tiles = weight.split(max(_AT_ONCE // weight.shape[1], 1))
        return not any(bool((tile.view(torch.int32) & _ROUNDED_OFF).any()) for tile in tiles)
    return weight.dtype == torch.bfloat16 and has("linear", weight.dtype)


def _supports(
    x_TI: Tensor, weight: Weight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> bool:
    return isinstance(weight, PackedPanels) and out_dtype in (None, weight.dtype, torch.float32)


@linear.provider(
    "native",
    needs=NEEDS,
    supported=runs_on,
    supports=_supports,
    prepare=with_packed_weight,
    pack=_pack,
)
def _linear(
    x_TI: Tensor, weight: PackedPanels, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    x_TI = x_TI.contiguous()
    if not fits(x_TI, weight, bias):
        raise TypeError(
            f"x is {x_TI.dtype} {list(x_TI.shape)}, the weight {weight.dtype} {list(weight.shape)}"
            + ("" if bias is None else f", the bias {bias.dtype} {list(bias.shape)}")
        )
    wanted = weight.dtype if out_dtype is None else out_dtype
    rows, (outputs, inputs) = len(x_TI), weight.shape
    out_TO = x_TI.new_empty(rows, outputs, dtype=wanted)
    in_float32 = wanted == torch.float32
    call("linear", weight.dtype, x_TI, weight.tensor, bias, out_TO, rows, outputs, inputs, in_float32)
    return out_TO
