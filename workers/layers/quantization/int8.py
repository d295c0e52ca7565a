"""INT8 weights whose activations kernels may round too (W8A8), as compressed-tensors and quark store it.

weight         [O, I]                       int8
weight_scale   [O, 1] or [O], or [] or [1]  weight[o, i] * weight_scale[o]
input_scale    [] or [1]                    of the inputs, where it is static: not needed

Kernels that round inputs do it with a scale for each token, which is never coarser than a static one.
"""

from functools import cache

import torch
from torch import Tensor

from atom_ops import ChannelINT8
from workers.layers.quantization.channel_scales import row_scales
from workers.layers.quantization.fills import fill_codes
from workers.layers.quantization.scheme import Scheme, StoredTensor

_CODES_STD = 40.0
_CODES = StoredTensor("", (1, 1), (torch.int8,), fill_codes(_CODES_STD), torch.int8)


@cache
def channel_int8(per_tensor: bool = False, static: bool = False) -> Scheme:
    """One scale for each output, or one for the tensor, which is repeated for its rows.

    `static`: the checkpoint has scales of the inputs.
    """
    name = "INT8 per tensor" if per_tensor else "INT8 per channel"
    tensors = (_CODES, row_scales(_CODES_STD, per_tensor, "weight_scale"))
    return Scheme(name, (1, 1), tensors, _weight, unused=("input_scale",) if static else ())


def _weight(values: Tensor, scales: Tensor) -> ChannelINT8:
    return ChannelINT8(values, scales.squeeze(-1))
