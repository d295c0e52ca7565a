"""Fused mixture of experts, of plain weights that are shuffled when they are loaded."""

import torch
from torch import Tensor

from atom_ops.aiter_impl import NEEDS, runs_on, takes_dtype
from atom_ops.ops.experts import ExpertActivation, ExpertWeights, experts
from atom_ops.weights import Shuffled, Weight
from atom_ops.weights.shuffled import can_shuffle


def _pack(weight_XOI: Weight) -> Shuffled | None:
    if not isinstance(weight_XOI, Tensor) or not takes_dtype(weight_XOI.dtype) or not can_shuffle(weight_XOI):
        return None
    from aiter.ops.shuffle import shuffle_weight

    return Shuffled(shuffle_weight(x=weight_XOI.contiguous(), layout=(16, 16)))


def _supports(
    x_TD: Tensor,
    ids_TJ: Tensor,
    weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> bool:
    matrices = (weights.gate_up_XOD, weights.down_XDF)
    return (
        activation is None
        and weights.gate_up_bias_XO is weights.down_bias_XD is None
        and all(isinstance(each, Shuffled) and each.tensor.dtype == x_TD.dtype for each in matrices)
    )


def _prepare(
    x_TD: Tensor,
    ids_TJ: Tensor,
    weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> tuple[Tensor, Tensor, Tensor, ExpertWeights, ExpertActivation]:
    gate_up, down = (_pack(each) or each for each in (weights.gate_up_XOD, weights.down_XDF))
    biases = weights.gate_up_bias_XO, weights.down_bias_XD
    return x_TD, ids_TJ, weights_TJ, ExpertWeights(gate_up, down, *biases, weights.complete), activation


@experts.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=_supports,
    prepare=_prepare,
    pack=_pack,
    batch_invariant=False,
)
def _fused(
    x_TD: Tensor,
    ids_TJ: Tensor,
    weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> Tensor:
    from aiter import ActivationType, QuantType
    from aiter.fused_moe import fused_moe

    gate_up, down = weights.gate_up_XOD, weights.down_XDF
    assert isinstance(gate_up, Shuffled) and isinstance(down, Shuffled), "checked by `_supports`"
    if not len(x_TD):
        return torch.empty_like(x_TD)
    ids_TJ, mask = ids_TJ.to(torch.int32), None
    if not weights.complete:
        # AITER leaves out experts whose mask is 0: one more stands for all those of other ranks.
        here = down.shape[0]
        ids_TJ = ids_TJ.where((ids_TJ >= 0) & (ids_TJ < here), here)
        mask = (torch.arange(here + 1, device=x_TD.device) < here).to(torch.int32)
    out_TD: Tensor = fused_moe(
        hidden_states=x_TD.contiguous(),
        w1=gate_up.tensor,
        w2=down.tensor,
        topk_weight=weights_TJ.contiguous(),
        topk_ids=ids_TJ.contiguous(),
        expert_mask=mask,
        activation=ActivationType.Silu,
        quant_type=QuantType.No,
    )
    return out_TD
