"""Linear layers with weights of integers (`linear_ints`), or of bfloat16 numbers.

In a float32 model bfloat16 numbers take half the memory.
"""

import torch
from torch import Tensor

from atom_ops.native_impl import NEEDS, call, has, linear_ints, runs_on
from atom_ops.native_impl.build import library
from atom_ops.ops.linear.linear import linear, pack_linear_weight, with_packed_weight
from atom_ops.ops.linear.linear_argmax import linear_argmax
from atom_ops.weights import Integers, PackedInts, PackedPanels, Weight

_ROUNDED_OFF = 0xFFFF
"""The bits of float32 that bfloat16 lacks."""
_AT_ONCE = 1 << 16
"""Numbers that are looked at together."""


def fits(x_TI: Tensor, weight: PackedPanels | PackedInts, bias: Tensor | None, parts: int = 1) -> bool:
    """Whether the kernels can multiply them; x has the inputs of so many parts side by side."""
    if isinstance(weight, PackedPanels):
        return _fit(x_TI, weight.dtype, weight.shape, bias, parts)
    return x_TI.dtype in (torch.bfloat16, torch.float32) and _fit(x_TI, x_TI.dtype, weight.shape, bias, parts)


def _fit(x_TI: Tensor, dtype: torch.dtype, shape: tuple[int, ...], bias: Tensor | None, parts: int) -> bool:
    outputs, inputs = shape
    if x_TI.dtype != dtype or x_TI.ndim != 2 or x_TI.shape[1] != parts * inputs or not x_TI.is_contiguous():
        return False
    return bias is None or (bias.dtype == dtype and bias.shape == (outputs,) and bias.is_contiguous())


def _pack(weight: Weight) -> PackedPanels | PackedInts | None:
    if isinstance(weight, Integers):
        return linear_ints.pack(weight)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[1] % 2 or not _is_exact(weight):
        return None
    outputs, inputs = weight.shape
    lanes = library().atom_lanes()
    panels = -(-outputs // lanes)
    whole = outputs // lanes
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
    if isinstance(weight, PackedInts):
        return True
    return isinstance(weight, PackedPanels) and out_dtype in (None, weight.dtype, torch.float32)


@linear.provider(
    "native",
    needs=NEEDS,
    supported=runs_on,
    supports=_supports,
    prepare=with_packed_weight,
    pack=_pack,
    quantizes_activations=True,
)
def _linear(
    x_TI: Tensor,
    weight: PackedPanels | PackedInts,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    wanted = x_TI.dtype if out_dtype is None else out_dtype
    if isinstance(weight, PackedInts) and x_TI.dtype not in (torch.bfloat16, torch.float32):
        return _linear(x_TI.float(), weight, None if bias is None else bias.float(), wanted)
    dtype = x_TI.dtype if isinstance(weight, PackedInts) else weight.dtype
    x_TI = x_TI.contiguous()
    if not _fit(x_TI, dtype, weight.shape, bias, 1):
        raise TypeError(
            f"x is {x_TI.dtype} {list(x_TI.shape)}, the weight {dtype} {list(weight.shape)}"
            + ("" if bias is None else f", the bias {bias.dtype} {list(bias.shape)}")
        )
    is_known = wanted in (dtype, torch.float32)
    rows = x_TI.shape[0]
    outputs, inputs = weight.shape
    out_TO = x_TI.new_empty(rows, outputs, dtype=wanted if is_known else torch.float32)
    if isinstance(weight, PackedInts):
        linear_ints.multiply(x_TI, weight, bias, out_TO)
    else:
        in_float32 = wanted == torch.float32
        call("linear", dtype, x_TI, weight.tensor, bias, out_TO, rows, outputs, inputs, in_float32)
    return out_TO if is_known else out_TO.to(wanted)


@linear_argmax.provider(
    "native",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_RI, weight: isinstance(weight, PackedPanels) and fits(x_RI, weight, None),
    prepare=lambda x_RI, weight: (x_RI, pack_linear_weight(weight)),
)
def _linear_argmax(x_RI: Tensor, weight: PackedPanels) -> Tensor:
    """The sums have the bits of `linear` in float32."""
    rows = x_RI.shape[0]
    outputs, inputs = weight.shape
    found_R = torch.empty(rows, dtype=torch.int64)
    call("linear_argmax", weight.dtype, x_RI, weight.tensor, found_R, rows, outputs, inputs)
    return found_R
