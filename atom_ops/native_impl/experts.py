"""Experts whose matrices are integers, multiplied one by one by the kernels of `linear`."""

from dataclasses import replace

from torch import Tensor

from atom_ops.native_impl import NEEDS, linear_ints, runs_on
from atom_ops.ops.experts.experts import (
    ExpertActivation,
    ExpertRole,
    ExpertWeights,
    experts,
    pack_expert_weight,
)
from atom_ops.weights import AffineInts, PackedInts, Weight


def _pack(weight: Weight, role: ExpertRole) -> PackedInts | None:
    return linear_ints.pack_stack(weight) if isinstance(weight, AffineInts) else None


def _supports(
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> bool:
    return any(isinstance(each, PackedInts) for each in (weights.gate_up_XOD, weights.down_XDF))


def _prepare(
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> tuple[Tensor, Tensor, Tensor, ExpertWeights, ExpertActivation]:
    gate_up = pack_expert_weight(weights.gate_up_XOD, ExpertRole(False, activation))
    down = pack_expert_weight(weights.down_XDF, ExpertRole(True, activation))
    packed = replace(weights, gate_up_XOD=gate_up, down_XDF=down)
    return x_TD, topk_ids_TJ, topk_weights_TJ, packed, activation


@experts.provider(
    "native",
    needs=NEEDS,
    supported=runs_on,
    supports=_supports,
    prepare=_prepare,
    pack=_pack,
    quantizes_activations=True,
)
def _experts(
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> Tensor:
    """The steps of the reference, whose matrices `linear` reads as they are packed."""
    return experts.reference(x_TD, topk_ids_TJ, topk_weights_TJ, weights, activation)
