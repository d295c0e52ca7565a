"""FP8 with one scale for a tensor or for each output.

    weight         [O, I]                        e4m3
    weight_scale   [] or [1], or [O] or [O, 1]   weight[o, i] * weight_scale[o]
    input_scale    [] or [1]                     of the inputs, where it is static

Of matrices fused into one, each keeps its own weight scale, and the input scale is the largest.
"""

from functools import cache

import torch
from torch import Tensor

from atom_ops import ChannelFP8
from workers.layers.quantization.block_fp8 import CODES, CODES_STD
from workers.layers.quantization.channel_scales import one_number, row_scales, shapes_of_one
from workers.layers.quantization.fills import fill_input_scales
from workers.layers.quantization.scheme import FLOATS, WHOLE, Scheme, StoredTensor

_SCALE = ("weight_scale",)
_INPUT_SCALE = ("input_scale",)


@cache
def tensor_fp8(
    static: bool, scale: tuple[str, ...] = _SCALE, input_scale: tuple[str, ...] = _INPUT_SCALE
) -> Scheme:
    """One scale for the tensor; `static`: and one for its inputs. Names as in the checkpoint."""
    scales = row_scales(CODES_STD, True, *scale)
    if not static:
        return Scheme("FP8 per tensor", (1, 1), (CODES, scales), _dynamic)
    inputs = StoredTensor(
        "_input_scale", (WHOLE, WHOLE), FLOATS, fill_input_scales, torch.float32, names=input_scale,
        disk_shapes=shapes_of_one,
        decode=one_number,
    )  # fmt: skip
    return Scheme("FP8 per tensor with static inputs", (1, 1), (CODES, scales, inputs), _static)


@cache
def channel_fp8(input_bound: float | None = None) -> Scheme:
    """One scale for each output; each token's activations have a scale of their own (PTPC)."""

    def weight(values: Tensor, scales: Tensor) -> ChannelFP8:
        return ChannelFP8(values, scales.squeeze(-1), None, input_bound)

    name = "FP8 per channel" + ("" if input_bound is None else f", inputs up to {input_bound:g}")
    return Scheme(name, (1, 1), (CODES, row_scales(CODES_STD, False, *_SCALE)), weight)


def _dynamic(values: Tensor, scales: Tensor) -> ChannelFP8:
    return ChannelFP8(values, scales.squeeze(-1))


def _static(values: Tensor, scales: Tensor, inputs: Tensor) -> ChannelFP8:
    return ChannelFP8(values, scales.squeeze(-1), inputs.amax((-2, -1)))
