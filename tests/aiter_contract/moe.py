"""AITER's shuffled weights and fused mixture of experts."""

from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from tests.aiter_contract import machine, mxfp4, rounding
from tests.aiter_contract.tiles import by_block, plain


class ActivationType(Enum):
    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


class QuantType(Enum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4


def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weight: Tensor,
    topk_ids: Tensor,
    expert_mask: Tensor | None = None,
    activation: ActivationType = ActivationType.Silu,
    quant_type: QuantType = QuantType.No,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
) -> Tensor:
    """w1 [E, 2I, D]: the gate's rows, then up's; w2 [E, D, I]. The mask is 1 for the experts here."""
    assert topk_ids.dtype == torch.int32 and topk_weight.dtype == torch.float32
    assert topk_ids.is_contiguous() and topk_weight.is_contiguous() and hidden_states.is_contiguous()
    swiglu = activation is ActivationType.Swiglu
    assert swiglu or (activation is ActivationType.Silu and bias1 is bias2 is None)
    assert not swiglu or quant_type is QuantType.per_1x32
    gate_up, down = (
        _numbers(w1, w1_scale, quant_type, swiglu, 2),
        _numbers(w2, w2_scale, quant_type, swiglu, 1),
    )
    assert gate_up.shape[1:] == (2 * down.shape[2], down.shape[1])
    assert hidden_states.shape[1] == down.shape[1] and w1.dtype == w2.dtype
    assert quant_type is not QuantType.No or w1.dtype == hidden_states.dtype
    every = torch.ones(len(w1), dtype=torch.int32) if expert_mask is None else expert_mask
    assert every.dtype == torch.int32 and every.sum() == len(w1)
    assert ((topk_ids >= 0) & (topk_ids < len(every))).all()
    # Only the first columns and features count; what is padded is not read.
    hidden, features = down.shape[1] - hidden_pad, down.shape[2] - intermediate_pad
    kept = _activations(hidden_states, quant_type, swiglu, w1)[:, :hidden].double()
    out = torch.zeros(hidden_states.shape, dtype=torch.float64)
    for here, number in enumerate(every.nonzero().flatten().tolist()):
        tokens, places = (topk_ids == number).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate, up = (kept[tokens] @ gate_up[here, :, :hidden].double().T + _bias(bias1, here, w1)).chunk(2, -1)
        inner = _glu(gate, up, swiglu)[:, :features].float()
        inner = _activations(inner, quant_type, swiglu, w1).double()
        y = inner @ down[here, :, :features].double().T + _bias(bias2, here, w2)
        out.index_add_(0, tokens, y * topk_weight[tokens, places, None])
    return out.to(hidden_states.dtype)


def _glu(gate: Tensor, up: Tensor, swiglu: bool) -> Tensor:
    if not swiglu:
        return functional.silu(gate) * up
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)


def _bias(bias: Tensor | None, expert: int, weight: Tensor) -> Tensor | float:
    if bias is None:
        return 0.0
    assert bias.dtype == torch.float32 and bias.shape == weight.shape[:2]
    return bias[expert].double()


def _numbers(weight: Tensor, scale: Tensor | None, quant_type: QuantType, swiglu: bool, parts: int) -> Tensor:
    """The matrices as the kernel understands them, float32."""
    if quant_type is QuantType.No:
        assert scale is None
        return plain(weight).float()
    assert scale is not None
    if quant_type is QuantType.per_1x32:
        assert machine.architecture == "gfx950" and (swiglu or getattr(weight, "is_shuffled", False))
        return mxfp4.stack(weight, scale, swiglu and parts == 2)
    assert weight.dtype == machine.fp8()
    if quant_type is QuantType.per_1x128:
        return by_block(plain(weight), scale)
    assert quant_type is QuantType.per_Token and scale.dtype == torch.float32
    assert scale.shape == (*weight.shape[:2], 1) and scale.is_contiguous()
    return plain(weight).float() * scale


def _activations(rows: Tensor, quant_type: QuantType, swiglu: bool, weight: Tensor) -> Tensor:
    """What the kernel multiplies by, float32."""
    if quant_type is QuantType.No or swiglu:
        return rows.float()
    if quant_type is QuantType.per_1x32:
        return mxfp4.rounded(rows)
    group = rows.shape[1] if quant_type is QuantType.per_Token else 128
    values, scales = rounding.by_group(rows, weight.dtype, group)
    return values.float() * scales.repeat_interleave(group, 1)
