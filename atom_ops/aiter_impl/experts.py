"""Fused mixture of experts, of weights that are shuffled when they are loaded.

weights      quant_type   activations
plain        No
ChannelFP8   per_Token    rounded to FP8, a scale for each token; scales of inputs are not used
BlockFP8     per_1x128    rounded to FP8, a scale for each 128 features
MXFP4        per_1x32     rounded to MXFP4; not with the clamped SwiGLU of GPT-OSS
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.aiter_impl import NEEDS, quantized_linear, runs_on, takes_dtype
from atom_ops.aiter_impl.mxfp4 import PADDED, shuffled_stack
from atom_ops.aiter_impl.rounding import has_mxfp4
from atom_ops.ops.experts.experts import ClampedSwiglu, ExpertActivation, ExpertRole, ExpertWeights, experts
from atom_ops.weights import MXFP4, BlockFP8, ChannelFP8, Shuffled, ShuffledFP8, ShuffledMXFP4, Weight
from atom_ops.weights.shuffled import can_shuffle

_SWIGLU = ClampedSwiglu(limit=7.0, alpha=1.702)
"""The one that the kernels compute."""
_FP8_UNIT = 128
"""Divides the sizes of experts in FP8."""


def _pack(weight: Weight, role: ExpertRole) -> Shuffled | ShuffledFP8 | ShuffledMXFP4 | None:
    outputs, inputs = weight.shape[1:]
    hidden, features = (outputs, inputs) if role.down else (inputs, outputs // 2)
    is_plain = role.activation is None and not role.with_biases
    if (
        isinstance(weight, Tensor)
        and is_plain
        and takes_dtype(weight.dtype)
        and can_shuffle(hidden, features)
    ):
        from aiter.ops.shuffle import shuffle_weight

        return Shuffled(shuffle_weight(x=weight.contiguous(), layout=(16, 16)))
    if isinstance(weight, BlockFP8 | ChannelFP8) and is_plain:
        in_blocks = isinstance(weight, ChannelFP8) or quantized_linear.has_blocks(weight)
        if in_blocks and hidden % _FP8_UNIT == features % _FP8_UNIT == 0:
            return quantized_linear.shuffled(weight)
    is_swiglu = role.activation == _SWIGLU
    if isinstance(weight, MXFP4) and (is_plain or is_swiglu) and has_mxfp4(weight.blocks.device):
        return shuffled_stack(weight, 1 if role.down else 2, is_swiglu)
    return None


def _supports(
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> bool:
    gate_up, down = weights.gate_up_XOD, weights.down_XDF
    if type(gate_up) is not type(down) or not takes_dtype(x_TD.dtype):
        return False
    if isinstance(gate_up, ShuffledMXFP4):
        return gate_up.interleaved == (activation is not None) and activation in (None, _SWIGLU)
    is_plain = activation is None and weights.gate_up_bias_XO is weights.down_bias_XD is None
    if isinstance(gate_up, Shuffled):
        return is_plain and gate_up.tensor.dtype == x_TD.dtype
    return is_plain and isinstance(gate_up, ShuffledFP8)


def _prepare(
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> tuple[Tensor, Tensor, Tensor, ExpertWeights, ExpertActivation]:
    with_biases = weights.gate_up_bias_XO is not None
    gate_up, down = (
        _pack(each, ExpertRole(each is weights.down_XDF, activation, with_biases)) or each
        for each in (weights.gate_up_XOD, weights.down_XDF)
    )
    return (
        x_TD,
        topk_ids_TJ,
        topk_weights_TJ,
        replace(weights, gate_up_XOD=gate_up, down_XDF=down),
        activation,
    )


@experts.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=_supports,
    prepare=_prepare,
    pack=_pack,
    batch_invariant=False,
    quantizes_activations=True,
)
def _fused(
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> Tensor:
    from aiter import ActivationType, QuantType
    from aiter.fused_moe import fused_moe

    if not len(x_TD):
        return torch.empty_like(x_TD)
    (w1, scale1), (w2, scale2) = _tensors(weights.gate_up_XOD), _tensors(weights.down_XDF)
    if isinstance(weights.down_XDF, ShuffledMXFP4):
        quant_type = QuantType.per_1x32
    elif isinstance(weights.down_XDF, ShuffledFP8):
        by_block = isinstance(weights.down_XDF.weight, BlockFP8)
        quant_type = QuantType.per_1x128 if by_block else QuantType.per_Token
    else:
        quant_type = QuantType.No
    experts_here, hidden, features = weights.down_XDF.shape
    padded_hidden, padded_features = _padded_sizes(weights)
    topk_ids_TJ, mask = _masked(topk_ids_TJ, weights, experts_here)
    out_TD: Tensor = fused_moe(
        hidden_states=functional.pad(x_TD, (0, padded_hidden - hidden)).contiguous(),
        w1=w1,
        w2=w2,
        topk_weight=topk_weights_TJ.contiguous(),
        topk_ids=topk_ids_TJ,
        expert_mask=mask,
        activation=ActivationType.Silu if activation is None else ActivationType.Swiglu,
        quant_type=quant_type,
        w1_scale=scale1,
        w2_scale=scale2,
        hidden_pad=padded_hidden - hidden,
        intermediate_pad=padded_features - features,
        bias1=_bias(weights.gate_up_bias_XO, 2, padded_features),
        bias2=_bias(weights.down_bias_XD, 1, padded_hidden),
    )
    return out_TD[:, :hidden].contiguous()


def _tensors(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """The matrices and their scales, as the kernels take them."""
    if isinstance(weight, ShuffledMXFP4):
        return weight.codes, weight.scales
    if isinstance(weight, ShuffledFP8):
        scales = weight.weight.scales
        return weight.weight.values, scales if isinstance(weight.weight, BlockFP8) else scales.unsqueeze(-1)
    assert isinstance(weight, Shuffled), "checked by `_supports`"
    return weight.tensor, None


def _padded_sizes(weights: ExpertWeights) -> tuple[int, int]:
    """Hidden size and features of an expert in the kernel."""
    _, hidden, features = weights.down_XDF.shape
    if isinstance(weights.down_XDF, ShuffledMXFP4):
        return -(-hidden // PADDED) * PADDED, -(-features // PADDED) * PADDED
    return hidden, features


def _masked(topk_ids_TJ: Tensor, weights: ExpertWeights, experts_here: int) -> tuple[Tensor, Tensor | None]:
    """Ids in int32 from 0 on, and the mask of the experts here; None if these are all.

    AITER leaves out experts whose mask is 0: one more stands for all those of other ranks.
    """
    topk_ids_TJ = topk_ids_TJ.to(torch.int32).contiguous()
    if weights.complete:
        return topk_ids_TJ, None
    topk_ids_TJ = topk_ids_TJ - weights.first
    topk_ids_TJ = topk_ids_TJ.where((topk_ids_TJ >= 0) & (topk_ids_TJ < experts_here), experts_here)
    return topk_ids_TJ, _mask(experts_here, topk_ids_TJ.device)


@cache
def _mask(experts_here: int, device: torch.device) -> Tensor:
    """First called in the step that measures memory: later, the memory of a graph would hold it."""
    return (torch.arange(experts_here + 1, device=device) < experts_here).to(torch.int32)


def _bias(bias_XO: Tensor | None, parts: int, size: int) -> Tensor | None:
    """A bias in float32, each of its parts padded to `size`."""
    if bias_XO is None:
        return None
    by_part = bias_XO.float().unflatten(1, (parts, -1))
    return functional.pad(by_part, (0, size - by_part.shape[-1])).flatten(1)
