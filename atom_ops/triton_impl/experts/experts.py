"""`experts` in Triton: see `expert_kernels` for the kernels, `expert_plans` for their tiles."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from atom_ops.ops.experts.experts import (
    ClampedSwiglu,
    ExpertActivation,
    ExpertRole,
    ExpertWeights,
    clamp_kind,
    experts,
)
from atom_ops.ops.linear.linear import BATCH_INVARIANT
from atom_ops.triton_impl.experts import expert_plans, expert_quantized
from atom_ops.triton_impl.experts.expert_blocks import ExpertBlocks, sort_by_expert
from atom_ops.triton_impl.experts.expert_kernels import _down, _gate_up, _grouped_gemm, _sum_pairs
from atom_ops.triton_impl.experts.expert_plans import (
    ExpertPlan,
    GroupedPlan,
    GroupedTile,
    PersistentPlan,
    VectorPlan,
    WgmmaPlan,
)
from atom_ops.triton_impl.hardware.pdl import launch_options
from atom_ops.triton_impl.hardware.persistent import programs_for
from atom_ops.triton_impl.hardware.target import INTERPRETED, NEEDS, is_hopper, runs_on
from atom_ops.triton_impl.plans.shipped import shipped_on
from atom_ops.weights import MXFP4, GroupINT4, Weight
from atom_ops.weights.four_bit_words import pack_words

_SUMMED_AT_ONCE = 512
_NOT_CLAMPED = ClampedSwiglu(0.0, 0.0)
"""In place of `silu_and_mul`, which has no parameters."""


def multiply(
    plan: ExpertPlan,
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation,
    described: bool,
) -> Tensor:
    """`experts` by this plan. `described`: weights are loaded by tensor descriptors (TMA)."""
    if not topk_ids_TJ.numel():
        return torch.empty_like(x_TD)
    x_TD = x_TD.contiguous()
    topk_ids_TJ = topk_ids_TJ.contiguous()
    topk_weights_TJ = topk_weights_TJ.contiguous()
    quantized = not isinstance(weights.down_XDF, Tensor)
    if isinstance(plan, VectorPlan):
        each_token = expert_quantized.each_token if quantized else _each_token
        return each_token(plan, x_TD, topk_ids_TJ, topk_weights_TJ, weights, activation)
    tokens, top_k = topk_ids_TJ.shape
    experts_X, hidden, features = weights.down_XDF.shape
    if isinstance(plan, WgmmaPlan):
        from atom_ops.triton_impl.experts import expert_wgmma  # Gluon for Hopper is not in every Triton

        y_PD = expert_wgmma.by_expert(plan, x_TD, topk_ids_TJ, weights, activation)
        return sum_pairs(y_PD, topk_ids_TJ, topk_weights_TJ, experts_X, weights.first)
    if isinstance(plan, PersistentPlan):
        from atom_ops.triton_impl.experts import hopper_experts  # as above

        y_PD = hopper_experts.by_expert(x_TD, topk_ids_TJ, weights, activation)
        return sum_pairs(y_PD, topk_ids_TJ, topk_weights_TJ, experts_X, weights.first)
    if quantized:
        y_PD = expert_quantized.by_expert(plan, x_TD, topk_ids_TJ, weights, activation, described)
        return sum_pairs(y_PD, topk_ids_TJ, topk_weights_TJ, experts_X, weights.first)
    blocks = sort_by_expert(topk_ids_TJ, experts_X, plan.block, weights.first)
    step = GroupedGEMMs(plan, blocks, top_k, described)
    inner_PF = x_TD.new_empty(tokens * top_k, features)
    step.gate_up(x_TD, weights, activation, inner_PF)
    y_PD = x_TD.new_empty(tokens * top_k, hidden)
    step.down(inner_PF, weights, y_PD)
    return sum_pairs(y_PD, topk_ids_TJ, topk_weights_TJ, experts_X, weights.first)


def sum_pairs(
    y_PD: Tensor, topk_ids_TJ: Tensor, topk_weights_TJ: Tensor, experts_X: int, first: int = 0
) -> Tensor:
    """The weighted sum of each token's rows of y, in the dtype of y."""
    tokens, top_k = topk_ids_TJ.shape
    hidden = y_PD.shape[1]
    out_TD = y_PD.new_empty(tokens, hidden)
    block = min(_SUMMED_AT_ONCE, triton.next_power_of_2(hidden))
    _sum_pairs[(tokens, triton.cdiv(hidden, block))](
        y_PD, topk_ids_TJ, topk_weights_TJ, out_TD, hidden, experts_X, first, TOP_K=top_k, BLOCK=block,
        num_warps=4, **launch_options(y_PD.device),
    )  # fmt: skip
    return out_TD


@dataclass(frozen=True, slots=True)
class GroupedGEMMs:
    """The grouped GEMMs of one call."""

    plan: GroupedPlan
    blocks: ExpertBlocks
    top_k: int
    described: bool

    def gate_up(
        self, x_TD: Tensor, weights: ExpertWeights, activation: ExpertActivation, inner_PF: Tensor
    ) -> None:
        """Fill `inner_PF`, in the order of the experts."""
        tile = self.plan.gate_up
        clamped = activation or _NOT_CLAMPED
        self._launch(
            tile, x_TD, _plain(weights)[0], weights.gate_up_bias_XO, inner_PF, clamped.limit, clamped.alpha,
            GATED=True, CLAMPED=clamp_kind(activation), X_DESCRIBED=False,
        )  # fmt: skip

    def down(self, inner_PF: Tensor, weights: ExpertWeights, y_PD: Tensor) -> None:
        """Fill `y_PD`, in the order of the pairs."""
        tile = self.plan.down
        x = inner_PF
        # TMA is slow with rows out of bounds.
        x_described = self.described and not self.plan.swapped and len(inner_PF) >= self.plan.block
        if x_described:
            x = TensorDescriptor.from_tensor(inner_PF, [self.plan.block, tile.columns])
        self._launch(
            tile, x, _plain(weights)[1], weights.down_bias_XD, y_PD, 0.0, 0.0,
            GATED=False, CLAMPED=False, X_DESCRIBED=x_described,
        )  # fmt: skip

    def _launch(
        self,
        tile: GroupedTile,
        x: Tensor,
        weight_XOI: Tensor,
        bias_XO: Tensor | None,
        out: Tensor,
        *activation: float,
        **flags: int,
    ) -> None:
        outputs = out.shape[1]
        inputs = weight_XOI.shape[2]
        weight = weight_XOI.flatten(0, 1)
        if self.described:
            weight = TensorDescriptor.from_tensor(weight, [tile.rows, tile.columns])
        tiles = self.blocks.most * triton.cdiv(outputs, tile.rows)
        _grouped_gemm[(programs_for(tiles, out.device) if tile.persistent else tiles,)](
            x, weight, bias_XO, self.blocks.order_P, self.blocks.blocks, out, outputs, inputs, self.top_k,
            *activation, HAS_BIAS=bias_XO is not None, DESCRIBED=self.described,
            EVEN=inputs % tile.columns == 0 and (self.described or outputs % tile.rows == 0),
            SWAPPED=self.plan.swapped, PERSISTENT=tile.persistent,
            TOKENS=self.plan.block, ROWS=tile.rows, COLUMNS=tile.columns,
            num_warps=tile.warps, num_stages=tile.stages, **flags, **launch_options(out.device),
        )  # fmt: skip


def _each_token(
    plan: VectorPlan,
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation,
) -> Tensor:
    tokens, top_k = topk_ids_TJ.shape
    experts_X, hidden, features = weights.down_XDF.shape
    gate_up, down = _plain(weights)
    tile = plan.gate_up
    options = launch_options(x_TD.device)
    inner_PF = x_TD.new_empty(tokens * top_k, features)
    out_TD = torch.empty_like(x_TD)
    clamped = activation or _NOT_CLAMPED
    _gate_up[(triton.cdiv(features, tile.rows), tokens * top_k)](
        x_TD, topk_ids_TJ, gate_up, weights.gate_up_bias_XO, inner_PF, features, hidden,
        experts_X, weights.first, top_k, clamped.limit, clamped.alpha, CLAMPED=clamp_kind(activation),
        HAS_BIAS=weights.gate_up_bias_XO is not None,
        EVEN=features % tile.rows == 0 and hidden % tile.columns == 0,
        ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages, num_warps=tile.warps, **options,
    )  # fmt: skip
    tile = plan.down
    _down[(triton.cdiv(hidden, tile.rows), tokens)](
        inner_PF, topk_ids_TJ, topk_weights_TJ, down, weights.down_bias_XD, out_TD, hidden, features,
        experts_X, weights.first, TOP_K=top_k, HAS_BIAS=weights.down_bias_XD is not None,
        BLOCK_J=triton.next_power_of_2(top_k), COMPLETE=weights.complete,
        EVEN=hidden % tile.rows == 0 and features % tile.columns == 0,
        ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages, num_warps=tile.warps, **options,
    )  # fmt: skip
    return out_TD


@cache
def _tuned(device: torch.device) -> dict[expert_plans.Layer, tuple[ExpertPlan, ...]]:
    return shipped_on(device).experts


def _plan(x_TD: Tensor, topk_ids_TJ: Tensor, weights: ExpertWeights) -> ExpertPlan:
    tokens, top_k = topk_ids_TJ.shape
    device = x_TD.device
    experts_X, hidden, features = weights.down_XDF.shape
    layer = expert_quantized.format_of(weights.down_XDF), (experts_X, hidden, features)
    plans = _tuned(device).get(layer, ())
    if INTERPRETED:
        plain = layer[0] == "plain"
        plans = expert_plans.INTERPRETED if plain else expert_plans.INTERPRETED_QUANTIZED
    hopper = is_hopper(device)
    gluon = _gluon_plans(x_TD, weights) if hopper else ()
    return expert_plans.tuned_plan(plans, tokens, gluon) or expert_plans.default_plan(
        layer, tokens, top_k, hopper, gluon
    )


def _gluon_plans(x_TD: Tensor, weights: ExpertWeights) -> expert_plans.GluonPlans:
    """The plans of kernels in Gluon that take these weights and activations, on Hopper."""
    from atom_ops.triton_impl.experts import hopper_experts  # Gluon for Hopper is not in every Triton

    persistent = hopper_experts.fits(x_TD, weights)
    if isinstance(weights.down_XDF, Tensor):
        return (PersistentPlan,) if persistent and _describable(weights) else ()
    if x_TD.dtype != torch.bfloat16 or not expert_quantized.wgmma_reads(weights):
        return ()
    return (WgmmaPlan, PersistentPlan) if persistent else (WgmmaPlan,)


def _plain(weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """The matrices, which `_supports` checked."""
    gate_up_XOD, down_XDF = weights.gate_up_XOD, weights.down_XDF
    assert isinstance(gate_up_XOD, Tensor) and isinstance(down_XDF, Tensor), "checked by `_supports`"
    return gate_up_XOD, down_XDF


def _describable(weights: ExpertWeights) -> bool:
    """Whether the GPU has tensor descriptors, and rows begin at multiples of 16 bytes as these need."""
    return all(
        is_hopper(codes.device)
        and codes.data_ptr() % 16 == 0
        and codes.stride(1) * codes.element_size() % 16 == 0
        for codes in map(expert_quantized.codes_of, (weights.gate_up_XOD, weights.down_XDF))
    )


def _supports(
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> bool:
    # The interpreter's bfloat16 tl.dot is wrong.
    dtypes = (torch.float32, torch.float16) if INTERPRETED else (torch.bfloat16, torch.float16)
    if x_TD.dtype not in dtypes:
        return False
    matrices = weights.gate_up_XOD, weights.down_XDF
    if not all(isinstance(matrix, Tensor) for matrix in matrices):
        return expert_quantized.readable(weights)
    return all(
        isinstance(matrix, Tensor) and matrix.dtype == x_TD.dtype and matrix.is_contiguous()
        for matrix in matrices
    )


def _pack(weight: Weight, role: ExpertRole | None = None) -> Weight | None:
    return pack_words(weight) if isinstance(weight, GroupINT4 | MXFP4) else None


def _packed(
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> tuple[Any, ...]:
    gate_up, down = (_pack(matrix) or matrix for matrix in (weights.gate_up_XOD, weights.down_XDF))
    return (
        x_TD,
        topk_ids_TJ,
        topk_weights_TJ,
        replace(weights, gate_up_XOD=gate_up, down_XDF=down),
        activation,
    )


@experts.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=_supports,
    prepare=_packed,
    pack=_pack,
    batch_invariant=False,
    quantizes_activations=True,
)
def _experts(
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> Tensor:
    plan = _plan(x_TD, topk_ids_TJ, weights)
    described = _describable(weights)
    return multiply(plan, x_TD, topk_ids_TJ, topk_weights_TJ, weights, activation, described)


@experts.provider(
    BATCH_INVARIANT,
    needs=NEEDS,
    supported=runs_on,
    supports=_supports,
    prepare=_packed,
    pack=_pack,
    quantizes_activations=True,
)
def _batch_invariant(
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation = None,
) -> Tensor:
    plan = expert_plans.BATCH_INVARIANT
    described = _describable(weights)
    return multiply(plan, x_TD, topk_ids_TJ, topk_weights_TJ, weights, activation, described)
