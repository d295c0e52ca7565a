"""`experts` with quantized weights: launches the kernels of `expert_grouped` and `expert_vectors`.

FP8 and INT8: with a `GroupedPlan` the activations are rounded too, x in groups of 128 inputs and what is
between the two GEMMs in groups as large as a tile; each group of a token has a scale of its own. With a
`VectorPlan`, and for 4-bit weights, they are not rounded.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from atom_ops.ops.experts.experts import ClampedSwiglu, ExpertActivation, ExpertWeights, clamp_kind
from atom_ops.triton_impl.experts.expert_blocks import ExpertBlocks, sort_by_expert
from atom_ops.triton_impl.experts.expert_grouped import _grouped_4bit, _grouped_8bit, _round_groups
from atom_ops.triton_impl.experts.expert_plans import Format, GroupedPlan, GroupedTile, VectorPlan
from atom_ops.triton_impl.experts.expert_vectors import _down_4bit, _down_8bit, _gate_up_4bit, _gate_up_8bit
from atom_ops.triton_impl.hardware.pdl import launch_options
from atom_ops.triton_impl.hardware.persistent import programs_for
from atom_ops.triton_impl.hardware.target import INTERPRETED
from atom_ops.triton_impl.quantized.four_bit import settings_of
from atom_ops.weights import BlockFP8, ChannelFP8, ChannelINT8, FourBitWords, Weight

SPAN = 128
"""Columns that the kernels take as one: of a group of x, and of a chunk of 4-bit words."""
_FP8_CAPABILITY = (8, 9)
_NOT_CLAMPED = ClampedSwiglu(0.0, 0.0)
EightBit = BlockFP8 | ChannelFP8 | ChannelINT8


def readable(weights: ExpertWeights) -> bool:
    """Whether the kernels read both matrices, which have the same type."""
    gate_up, down = weights.gate_up_XOD, weights.down_XDF
    if type(gate_up) is not type(down):
        return False
    if isinstance(gate_up, FourBitWords):
        return True
    if isinstance(gate_up, BlockFP8) and isinstance(down, BlockFP8):
        blocks_end = down.shape[2] % SPAN == 0  # a block has rows of the gate or of up
        blocks = gate_up.block == down.block == (SPAN, SPAN)
        return blocks and blocks_end and _has_fp8(gate_up.values)
    if isinstance(gate_up, ChannelFP8):
        return _has_fp8(gate_up.values)
    return isinstance(gate_up, ChannelINT8)


def wgmma_reads(weights: ExpertWeights) -> bool:
    """Whether `expert_wgmma` takes both matrices, on Hopper."""
    from atom_ops.triton_impl.quantized.four_bit_wgmma import reads  # Gluon for Hopper is not in every Triton

    return all(
        isinstance(matrix, FourBitWords) and reads(matrix)
        for matrix in (weights.gate_up_XOD, weights.down_XDF)
    )


def _has_fp8(values: Tensor) -> bool:
    """Whether Triton multiplies e4m3 on this GPU."""
    if INTERPRETED or values.is_meta:
        return True
    capability = torch.cuda.get_device_capability(values.device)
    return torch.version.hip is None and capability >= _FP8_CAPABILITY


def format_of(weight: Weight) -> Format:
    """The format, by which plans are chosen."""
    if isinstance(weight, FourBitWords):
        return "int4" if weight.group else "mxfp4"
    if isinstance(weight, BlockFP8):
        return "block_fp8"
    if isinstance(weight, ChannelFP8):
        return "channel_fp8"
    return "int8" if isinstance(weight, ChannelINT8) else "plain"


def codes_of(weight: Weight) -> Tensor:
    """The tensor of a weight's numbers, [X, O, stored columns]."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, FourBitWords):
        return weight.words
    assert isinstance(weight, EightBit), "checked by `readable`"
    return weight.values


def each_token(
    plan: VectorPlan,
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    topk_weights_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation,
) -> Tensor:
    """`experts` by this plan; the arguments are contiguous."""
    tokens, top_k = topk_ids_TJ.shape
    experts_X, hidden, features = weights.down_XDF.shape
    inner_PF = x_TD.new_empty(tokens * top_k, features)
    out_TD = torch.empty_like(x_TD)
    clamped = activation or _NOT_CLAMPED
    gate_up = weights.gate_up_XOD
    down = weights.down_XDF
    four_bit = isinstance(gate_up, FourBitWords)
    experts_J = triton.next_power_of_2(top_k)
    spans = 1 if four_bit else plan.gate_up.columns // SPAN
    settings = {
        "HAS_BIAS": weights.gate_up_bias_XO is not None, "CLAMPED": clamp_kind(activation),
        "EVEN": features % plan.gate_up.rows == 0 and _spans(gate_up) % spans == 0,
        "ROWS": plan.gate_up.rows, "STAGES": plan.gate_up.stages,
        "num_warps": plan.gate_up.warps, **launch_options(x_TD.device),
    }  # fmt: skip
    least_width = 8 if torch.version.hip is None else 16  # columns of the tensor cores' second operand
    settings |= {"WIDTH": least_width} if four_bit else {"SPANS": spans}
    kernel = _gate_up_4bit if four_bit else _gate_up_8bit
    sizes, of_weight = _layout(gate_up)
    kernel[(triton.cdiv(features, plan.gate_up.rows), tokens * top_k)](
        x_TD, topk_ids_TJ, *_tensors(gate_up), weights.gate_up_bias_XO, inner_PF, features, hidden, *sizes,
        experts_X, weights.first, top_k, clamped.limit, clamped.alpha, **of_weight, **settings,
    )  # fmt: skip
    whole = weights.complete and top_k == experts_J and _spans(down) > 0
    settings = {
        "HAS_BIAS": weights.down_bias_XD is not None, "TOP_K": top_k,
        "BLOCK_J": experts_J, "EVEN": whole and hidden % plan.down.rows == 0,
        "ROWS": plan.down.rows, "STAGES": plan.down.stages, "num_warps": plan.down.warps,
        **launch_options(x_TD.device),
    }  # fmt: skip
    if four_bit:
        settings["WIDTH"] = max(least_width, experts_J)
    kernel = _down_4bit if four_bit else _down_8bit
    sizes, of_weight = _layout(down)
    kernel[(triton.cdiv(hidden, plan.down.rows), tokens)](
        inner_PF, topk_ids_TJ, topk_weights_TJ, *_tensors(down), weights.down_bias_XD, out_TD,
        hidden, features, *sizes, experts_X, weights.first, **of_weight, **settings,
    )  # fmt: skip
    return out_TD


def _spans(weight: Weight) -> int:
    """Spans of a row; a row of 8-bit numbers that ends within one counts as none that could be read whole."""
    if isinstance(weight, FourBitWords) or weight.shape[2] % SPAN == 0:
        return -(-weight.shape[2] // SPAN)
    return -1 << 20 | 1


def _tensors(weight: Weight) -> tuple[Tensor | None, ...]:
    """What the kernels read: numbers and scales, and zero points of 4-bit weights."""
    if isinstance(weight, FourBitWords):
        return weight.words, weight.scales, weight.zeros
    assert isinstance(weight, EightBit), "checked by `readable`"
    return weight.values, weight.scales


def _layout(weight: Weight) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The sizes of the scales, and the settings that a weight's type gives to the vector kernels."""
    if isinstance(weight, FourBitWords):
        return (weight.scales.shape[2],), settings_of(weight)
    if isinstance(weight, BlockFP8):
        return (weight.scales.shape[1], weight.scales.shape[2]), {"BLOCK": weight.block[0]}
    return (weight.shape[1], 1), {"BLOCK": 0}


@dataclass(frozen=True, slots=True)
class QuantizedGEMMs:
    """The grouped GEMMs of one call with quantized weights."""

    plan: GroupedPlan
    blocks: ExpertBlocks
    top_k: int
    described: bool

    def gate_up(
        self, x_TD: Tensor, weights: ExpertWeights, activation: ExpertActivation, inner: "Rounded | Tensor"
    ) -> None:
        """Fill `inner` [P, F], in the order of the experts."""
        tile = self.plan.gate_up
        clamped = activation or _NOT_CLAMPED
        weight = weights.gate_up_XOD
        bias = weights.gate_up_bias_XO
        flags = {"GATED": True, "CLAMPED": clamp_kind(activation)}
        if isinstance(inner, Rounded):
            x = rounded(x_TD, inner.codes.dtype)
            self._launch_8bit(tile, x, weight, bias, inner.codes, inner.scales, clamped, flags)
        else:
            self._launch_4bit(tile, x_TD, weight, bias, inner, clamped, flags)

    def down(self, inner: "Rounded | Tensor", weights: ExpertWeights, y_PD: Tensor) -> None:
        """Fill `y_PD`, in the order of the pairs."""
        weight = weights.down_XDF
        bias = weights.down_bias_XD
        flags = {"GATED": False, "CLAMPED": clamp_kind(None)}
        if isinstance(inner, Rounded):
            self._launch_8bit(self.plan.down, inner, weight, bias, y_PD, None, _NOT_CLAMPED, flags)
        else:
            self._launch_4bit(self.plan.down, inner, weight, bias, y_PD, _NOT_CLAMPED, flags)

    def inner(self, weights: ExpertWeights, x_TD: Tensor) -> "Rounded | Tensor":
        """Memory for what is between the two GEMMs, [P, F]."""
        pairs = len(self.blocks.order_P)
        features = weights.down_XDF.shape[2]
        if isinstance(weights.gate_up_XOD, FourBitWords):
            return x_TD.new_empty(pairs, features)
        group = self.plan.gate_up.rows
        device = x_TD.device
        codes = torch.empty(pairs, features, dtype=codes_of(weights.gate_up_XOD).dtype, device=device)
        scales = torch.empty(pairs, triton.cdiv(features, group), dtype=torch.float32, device=device)
        return Rounded(codes, scales, group)

    def _launch_8bit(
        self,
        tile: GroupedTile,
        x: "Rounded",
        weight: Weight,
        bias: Tensor | None,
        out: Tensor,
        out_scales: Tensor | None,
        clamped: ClampedSwiglu,
        flags: dict[str, int],
    ) -> None:
        values, scales = _tensors(weight)
        assert values is not None
        outputs = out.shape[1]
        inputs = values.shape[2]
        columns = min(tile.columns, x.group)
        sizes, settings = _layout(weight)
        if settings["BLOCK"] % tile.rows:
            raise ValueError(
                f"a tile of {tile.rows} rows has several scales of {settings['BLOCK']} rows each"
            )
        matrix, grid = self._matrix(values, tile, outputs, columns)
        _grouped_8bit[grid](
            x.codes, x.scales, matrix, scales, bias, self.blocks.order_P, self.blocks.blocks, out, out_scales,
            outputs, inputs, x.scales.shape[1], *sizes, self.top_k, clamped.limit, clamped.alpha,
            INTEGER=values.dtype == torch.int8, X_GROUP=x.group, HAS_BIAS=bias is not None,
            EVEN=inputs % columns == 0 and (self.described or outputs % tile.rows == 0),
            SWAPPED=self.plan.swapped, COLUMNS=columns, **settings, **flags, **self._options(tile, out),
        )  # fmt: skip

    def _launch_4bit(
        self,
        tile: GroupedTile,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        out: Tensor,
        clamped: ClampedSwiglu,
        flags: dict[str, int],
    ) -> None:
        assert isinstance(weight, FourBitWords), "checked by `readable`"
        outputs = out.shape[1]
        inputs = weight.inputs
        stored = weight.words.shape[2]
        matrix, grid = self._matrix(weight.words, tile, outputs, 32)
        _grouped_4bit[grid](
            x, matrix, weight.scales, weight.zeros, bias, self.blocks.order_P, self.blocks.blocks, out,
            outputs, inputs, stored // 32, weight.scales.shape[2], self.top_k, clamped.limit, clamped.alpha,
            HAS_BIAS=bias is not None,
            EVEN=inputs % SPAN == 0 and (self.described or outputs % tile.rows == 0),
            **settings_of(weight), **flags, **self._options(tile, out),
        )  # fmt: skip

    def _matrix(
        self, codes_XOI: Tensor, tile: GroupedTile, outputs: int, columns: int
    ) -> tuple[Tensor | TensorDescriptor, tuple[int]]:
        """The weight as the kernels take it, and their grid."""
        flat = codes_XOI.flatten(0, 1)
        matrix = TensorDescriptor.from_tensor(flat, [tile.rows, columns]) if self.described else flat
        tiles = self.blocks.most * triton.cdiv(outputs, tile.rows)
        return matrix, (programs_for(tiles, codes_XOI.device) if tile.persistent else tiles,)

    def _options(self, tile: GroupedTile, out: Tensor) -> dict[str, Any]:
        return {
            "DESCRIBED": self.described, "PERSISTENT": tile.persistent, "TOKENS": self.plan.block,
            "ROWS": tile.rows, "num_warps": tile.warps, "num_stages": tile.stages,
            **launch_options(out.device),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rounded:
    """Activations [rows, I] in 8 bits."""

    codes: Tensor
    scales: Tensor
    """float32 [rows, ceil(I / group)]."""
    group: int


def rounded(x_TI: Tensor, dtype: torch.dtype) -> Rounded:
    """x in e4m3 or int8, in groups of 128 inputs."""
    tokens, size = x_TI.shape
    groups = triton.cdiv(size, SPAN)
    codes = torch.empty(tokens, size, dtype=dtype, device=x_TI.device)
    scales = torch.empty(tokens, groups, dtype=torch.float32, device=x_TI.device)
    at_once = min(16, triton.next_power_of_2(groups))
    _round_groups[(tokens, triton.cdiv(groups, at_once))](
        x_TI, codes, scales, size, groups,
        INTEGER=dtype == torch.int8, GROUP=SPAN, GROUPS=at_once, num_warps=4, **launch_options(x_TI.device),
    )  # fmt: skip
    return Rounded(codes, scales, SPAN)


def by_expert(
    plan: GroupedPlan,
    x_TD: Tensor,
    topk_ids_TJ: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation,
    described: bool,
) -> Tensor:
    """Each expert's result for its pairs, [P, D] in the order of the pairs."""
    experts_X, hidden, _ = weights.down_XDF.shape
    blocks = sort_by_expert(topk_ids_TJ, experts_X, plan.block, weights.first)
    step = QuantizedGEMMs(plan, blocks, topk_ids_TJ.shape[1], described)
    inner = step.inner(weights, x_TD)
    step.gate_up(x_TD, weights, activation, inner)
    y_PD = x_TD.new_empty(topk_ids_TJ.numel(), hidden)
    step.down(inner, weights, y_PD)
    return y_PD
