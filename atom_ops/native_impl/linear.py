"""Linear layers in bfloat16."""

import torch
from torch import Tensor

from atom_ops.native_impl import NEEDS, call, has, runs_on
from atom_ops.ops.linear import linear, pack_linear_weight
from atom_ops.weights import PackedPanels, Weight

LINEAR_NEEDS = f"{NEEDS}, and AVX-512 for bfloat16 without AMX"
_DTYPE = torch.bfloat16
_PANEL = 16
"""Outputs of a panel."""


def linear_runs_on(device: torch.device) -> bool:
    """The `supported` check of providers that multiply by `PackedPanels`."""
    return runs_on(device) and has("linear")


def fits(x_TI: Tensor, weight: PackedPanels, bias: Tensor | None, parts: int = 1) -> bool:
    """Whether the kernels can multiply them; x has the inputs of so many parts side by side."""
    outputs, inputs = weight.shape
    if x_TI.dtype != _DTYPE or x_TI.ndim != 2 or x_TI.shape[1] != parts * inputs or not x_TI.is_contiguous():
        return False
    return bias is None or (bias.dtype == _DTYPE and bias.shape == (outputs,) and bias.is_contiguous())


def _pack(weight: Weight) -> PackedPanels | None:
    if not isinstance(weight, Tensor) or weight.dtype != _DTYPE or weight.shape[1] % 2:
        return None
    outputs, inputs = weight.shape
    panels = -(-outputs // _PANEL)
    tensor = weight.new_zeros(panels, inputs // 2, _PANEL, 2)
    whole = outputs // _PANEL
    tensor[:whole] = _panels(weight[: whole * _PANEL])
    if panels > whole:
        tensor[whole:, :, : outputs % _PANEL] = weight[whole * _PANEL :].unflatten(1, (-1, 2)).transpose(0, 1)
    return PackedPanels(tensor, (outputs, inputs))


def _panels(weight: Tensor) -> Tensor:
    return weight.unflatten(0, (-1, _PANEL)).unflatten(2, (-1, 2)).transpose(1, 2)


def _supports(
    x_TI: Tensor, weight: Weight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> bool:
    return isinstance(weight, PackedPanels) and out_dtype in (None, _DTYPE, torch.float32)


@linear.provider(
    "native",
    needs=LINEAR_NEEDS,
    supported=linear_runs_on,
    supports=_supports,
    prepare=lambda x_TI, weight, bias=None, out_dtype=None: (
        x_TI,
        pack_linear_weight(weight),
        bias,
        out_dtype,
    ),
    pack=_pack,
)
def _linear(
    x_TI: Tensor, weight: PackedPanels, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    x_TI = x_TI.contiguous()
    if not fits(x_TI, weight, bias):
        raise TypeError(
            f"x is {x_TI.dtype} {list(x_TI.shape)}, the weight bfloat16 {list(weight.shape)}"
            + ("" if bias is None else f", the bias {bias.dtype} {list(bias.shape)}")
        )
    rows, (outputs, inputs) = len(x_TI), weight.shape
    wanted = _DTYPE if out_dtype is None else out_dtype
    out_TO = x_TI.new_empty(rows, outputs, dtype=wanted)
    call("linear", wanted, x_TI, weight.tensor, bias, out_TO, rows, outputs, inputs)
    return out_TO
