"""`linear` with a quantized weight, alone or after a norm or a gated activation.

    1 token          `quantized_gemv`, `hopper_gemv`, `four_bit_gemv`: weights decoded in registers,
                     activations not rounded
    few, 4-bit       `four_bit_mma`, `four_bit_ring`: the same on tensor cores; the ring takes one token
                     before its norm or its activation
    several, 8-bit   activations rounded to 8 bits as well, by the kernel of the norm or the activation
                     before (`rounded_rows`); then `eight_bit_linear` or torch._scaled_mm
    several, 4-bit   `four_bit_linear`, on Hopper `four_bit_split_k`, activations not rounded; many: the
                     weight decoded, and plain GEMM

Activations are rounded with a scale for each token, or, for torch._scaled_mm and FP8 in blocks, for each
block of inputs of a token. A static input scale of a checkpoint is not used: a token's own is as good.
"""

from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor

from atom_ops.ops.elementwise.activation import silu_and_mul
from atom_ops.ops.elementwise.norm import add_rms_norm, rms_norm
from atom_ops.ops.linear.linear import linear
from atom_ops.triton_impl.hardware.target import INTERPRETED, is_hopper
from atom_ops.triton_impl.plans.linear_plans import StreamKPlan
from atom_ops.triton_impl.quantized import eight_bit_linear, four_bit_gemv, four_bit_linear, quantized_gemv
from atom_ops.triton_impl.quantized.known_plans import plans_of
from atom_ops.triton_impl.quantized.quantized_plans import (
    GemmPlan,
    GemvPlan,
    LibraryPlan,
    MmaPlan,
    Packed,
    PersistentGemvPlan,
    QuantizedPlan,
    RingPlan,
    WgmmaPlan,
)
from atom_ops.triton_impl.quantized.rounded_rows import MOST_INPUTS, Form, RoundedRows, round_rows
from atom_ops.weights import MXFP4, BlockFP8, ChannelFP8, ChannelINT8, FourBitWords, GroupINT4, Weight
from atom_ops.weights.four_bit_words import pack_words

_BLOCK = 128
_LIBRARY_TILE = 16
_FP8_CAPABILITY = (8, 9)


def supports(weight: Weight, x: Tensor) -> TypeGuard[Packed]:
    """Whether `multiply` can run with these activations, [T, I] or [T, 2I]."""
    dtypes = (torch.float32, torch.float16) if INTERPRETED else (torch.bfloat16, torch.float16)
    return readable(weight) and x.dtype in dtypes and len(x) > 0


def readable(weight: Weight) -> TypeGuard[Packed]:
    """Whether the kernels run on the weight's device and read its type and shape."""
    if not isinstance(weight, Packed) or not _reads(weight):
        return False
    return INTERPRETED or _runs(weight.scales.device, isinstance(weight, BlockFP8 | ChannelFP8))


def _reads(weight: Packed) -> bool:
    if len(weight.shape) != 2:
        return False
    inputs = weight.shape[1]
    if isinstance(weight, BlockFP8):
        return weight.block[0] % _BLOCK == 0 and weight.block[1] == _BLOCK and inputs <= MOST_INPUTS
    return isinstance(weight, FourBitWords) or inputs <= MOST_INPUTS


def packed(weight: Weight) -> FourBitWords | None:
    """The layout that `multiply` reads, where it differs and the kernels run on the weight's device."""
    if not isinstance(weight, GroupINT4 | MXFP4) or len(weight.shape) != 2:
        return None
    return pack_words(weight) if INTERPRETED or _runs(weight.scales.device, False) else None


@cache
def _runs(device: torch.device, fp8: bool) -> bool:
    """On NVIDIA GPUs alone; e4m3 needs conversions in hardware."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return not fp8 or torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


def plan_of(x: Tensor, weight: Packed, dtype: torch.dtype) -> QuantizedPlan:
    """The plan for this number of tokens and this dtype of the result."""
    bfloat16 = x.dtype == dtype == torch.bfloat16
    plans = plans_of(weight, bfloat16)
    if isinstance(weight, FourBitWords):
        return next(plan for plan in plans if len(x) <= plan.tokens and takes(plan, weight, bfloat16))
    if isinstance(weight, BlockFP8 | ChannelFP8) and not _has_library(x, weight, dtype):
        plans = tuple(plan for plan in plans if not isinstance(plan, LibraryPlan))
    return next(plan for plan in plans if len(x) <= plan.tokens)


def takes(plan: QuantizedPlan, weight: FourBitWords, bfloat16: bool) -> bool:
    """Whether the plan's kernel multiplies by this weight; `bfloat16`: activations and result."""
    if isinstance(plan, MmaPlan):
        return bfloat16
    if not isinstance(plan, WgmmaPlan | RingPlan):
        return True
    if not bfloat16 or not is_hopper(weight.words.device):
        return False
    from atom_ops.triton_impl.quantized import (  # Gluon for Hopper is not in every Triton
        four_bit_ring,
        four_bit_wgmma,
    )

    return four_bit_ring.reads(weight) if isinstance(plan, RingPlan) else four_bit_wgmma.reads(weight)


def _has_library(x: Tensor, weight: BlockFP8 | ChannelFP8, dtype: torch.dtype) -> bool:
    """Whether torch._scaled_mm multiplies by this type of weight."""
    return dtype == torch.bfloat16 and _scales_blocks(x.device, isinstance(weight, BlockFP8))


@cache
def _scales_blocks(device: torch.device, blocks: bool) -> bool:
    """Blocks need Hopper and cuBLAS of CUDA 12.9."""
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return not blocks or (is_hopper(device) and version >= (12, 9))


def supports_norm(x_TD: Tensor, weight: Weight) -> bool:
    """Whether the norm before runs in the same kernel as another step of `multiply`."""
    if not supports(weight, x_TD):
        return False
    plan = plan_of(x_TD, weight, x_TD.dtype)
    if isinstance(plan, PersistentGemvPlan):
        return False
    if isinstance(plan, RingPlan):
        return len(x_TD) == 1
    return plan.columns == 0 if isinstance(plan, GemvPlan) else _rounds(plan, weight)


def supports_gate(x_T2F: Tensor, weight: Weight) -> bool:
    """Whether the activation before runs in the same kernel as another step of `multiply`."""
    if not supports(weight, x_T2F):
        return False
    plan = plan_of(x_T2F, weight, x_T2F.dtype)
    if isinstance(plan, PersistentGemvPlan):
        return True
    if isinstance(plan, RingPlan):
        return len(x_T2F) == 1
    return not isinstance(plan, GemvPlan) and _rounds(plan, weight)


def _rounds(plan: QuantizedPlan, weight: Packed) -> bool:
    """Whether the plan's GEMM reads `RoundedRows`."""
    if isinstance(weight, FourBitWords):
        return False
    return isinstance(plan, GemmPlan) or isinstance(weight, BlockFP8 | ChannelFP8)


def multiply(
    plan: QuantizedPlan,
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    residual_TD: Tensor | None = None,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(linear of x, or of its norm or gated activation, in `dtype`; x + residual)."""
    if isinstance(plan, PersistentGemvPlan):
        if not gated:
            x, total = _apart(x, False, residual_TD, norm_weight_D, eps)
            return _persistent_vector(plan, x, weight, bias, dtype, gated), total
        return _persistent_vector(plan, x, weight, bias, dtype, gated), x
    if isinstance(plan, RingPlan) and len(x) == 1 and _is_bfloat16(norm_weight_D):
        return _ring(plan, x, weight, bias, gated, residual_TD, norm_weight_D, eps)
    if isinstance(plan, GemvPlan) and plan.columns == 0 and not gated:
        return _vector(plan, x, weight, bias, dtype, residual_TD, norm_weight_D, eps)
    if isinstance(plan, GemvPlan) or not _rounds(plan, weight):
        x, total = _apart(x, gated, residual_TD, norm_weight_D, eps)
        if isinstance(plan, GemvPlan):
            return _vector(plan, x, weight, bias, dtype, None, None, 0.0)[0], total
        assert isinstance(weight, FourBitWords), "kernels of the other types read rounded rows"
        if isinstance(plan, RingPlan):
            return _ring(plan, x, weight, bias)[0], total
        if isinstance(plan, MmaPlan):
            return _few(plan, x, weight, bias), total
        if isinstance(plan, WgmmaPlan):
            from atom_ops.triton_impl.quantized import (
                four_bit_split_k,  # Gluon for Hopper is not in every Triton
            )

            return four_bit_split_k.multiply(plan, x, weight, bias), total
        if isinstance(plan, GemmPlan):
            return four_bit_linear.multiply(plan, x, weight, bias, dtype), total
        return _decoded(x, weight, bias, dtype), total
    form, tile, group = _form(weight), _LIBRARY_TILE, 0
    if isinstance(plan, GemmPlan | StreamKPlan):
        tile = plan.tile
    elif isinstance(weight, BlockFP8):
        group = weight.block[1]
    rows, total = round_rows(
        x, form, tile, group=group, gated=gated, residual_TD=residual_TD, norm_weight_D=norm_weight_D, eps=eps
    )  # fmt: skip
    if isinstance(plan, LibraryPlan):
        return _scaled_mm(rows, len(x), weight, bias), total
    if isinstance(plan, StreamKPlan):
        from atom_ops.triton_impl.linear import hopper_linear  # Gluon for Hopper is not in every Triton

        assert isinstance(weight, BlockFP8 | ChannelFP8)
        return hopper_linear.multiply_e4m3(plan, rows, len(x), weight, bias, dtype), total
    assert isinstance(plan, GemmPlan) and not isinstance(weight, FourBitWords), "multiplied above"
    return eight_bit_linear.multiply(plan, rows, len(x), weight, bias, dtype), total


def _form(weight: Packed) -> Form:
    return "int8" if isinstance(weight, ChannelINT8) else "e4m3"


def _apart(
    x: Tensor, gated: bool, residual_TD: Tensor | None, norm_weight_D: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm or activation of x, x + residual) by the ops of their own."""
    if gated:
        return silu_and_mul(x), x
    if norm_weight_D is None:
        return x.contiguous(), x
    if residual_TD is None:
        return rms_norm(x, norm_weight_D, eps), x
    return add_rms_norm(x, residual_TD, norm_weight_D, eps)


def _vector(
    plan: GemvPlan,
    x_TI: Tensor,
    weight: Packed,
    bias: Tensor | None,
    dtype: torch.dtype,
    residual_TI: Tensor | None,
    norm_weight_I: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    x_TI = x_TI.contiguous()
    out_TO = torch.empty(1, weight.shape[0], dtype=dtype, device=x_TI.device)
    total_TI = x_TI if residual_TI is None else torch.empty_like(x_TI)
    rest = bias, out_TO, residual_TI, norm_weight_I, eps, total_TI
    if isinstance(weight, FourBitWords):
        four_bit_gemv.multiply(plan, x_TI, weight, *rest)
    else:
        quantized_gemv.multiply(plan, x_TI, weight, *rest)
    return out_TO, total_TI


def _persistent_vector(
    plan: PersistentGemvPlan, x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype, gated: bool
) -> Tensor:
    from atom_ops.triton_impl.linear import hopper_gemv  # Gluon is not in every Triton

    assert isinstance(weight, BlockFP8)
    out_TO = torch.empty(1, weight.shape[0], dtype=dtype, device=x.device)
    hopper_gemv.multiply(plan, x.contiguous(), weight, out_TO, gated=gated)
    return out_TO if bias is None else out_TO + bias


def _is_bfloat16(norm_weight_D: Tensor | None) -> bool:
    return norm_weight_D is None or norm_weight_D.dtype == torch.bfloat16


def _ring(
    plan: RingPlan,
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    gated: bool = False,
    residual_TI: Tensor | None = None,
    norm_weight_I: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    from atom_ops.triton_impl.quantized import four_bit_ring  # Gluon for Hopper is not in every Triton

    assert isinstance(weight, FourBitWords)
    x = x.contiguous()
    out_TO = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    total = x if residual_TI is None else torch.empty_like(x)
    four_bit_ring.multiply(
        plan, x, weight, bias, out_TO,
        gated=gated, residual_TI=residual_TI, norm_weight_I=norm_weight_I, eps=eps, total_TI=total,
    )  # fmt: skip
    return out_TO, total


def _few(plan: MmaPlan, x_TI: Tensor, weight: FourBitWords, bias: Tensor | None) -> Tensor:
    from atom_ops.triton_impl.quantized import four_bit_mma  # Gluon is not in every Triton

    out_TO = torch.empty(len(x_TI), weight.shape[0], dtype=x_TI.dtype, device=x_TI.device)
    four_bit_mma.multiply(plan, x_TI, weight, bias, out_TO)
    return out_TO


def _decoded(x_TI: Tensor, weight: FourBitWords, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A plain GEMM with the weight decoded, a part of its rows at a time."""
    outputs, inputs = weight.shape
    each = max(_DECODED_NUMBERS // inputs // _BLOCK, 1) * _BLOCK
    if each >= outputs:
        return linear(x_TI, four_bit_linear.dequantized(weight, x_TI.dtype), bias, dtype)
    out_TO = torch.empty(len(x_TI), outputs, dtype=dtype, device=x_TI.device)
    for start in range(0, outputs, each):
        stop = min(start + each, outputs)
        part = four_bit_linear.dequantized(weight.rows(start, stop), x_TI.dtype)
        out_TO[:, start:stop] = linear(x_TI, part, None if bias is None else bias[start:stop], dtype)
    return out_TO


_DECODED_NUMBERS = 1 << 28


def _scaled_mm(rows: RoundedRows, tokens: int, weight: Packed, bias: Tensor | None) -> Tensor:
    """[T, O] in bfloat16, by cuBLAS or CUTLASS."""
    assert isinstance(weight, BlockFP8 | ChannelFP8)
    blocks = isinstance(weight, BlockFP8)
    scales = (rows.scales.t(), weight.scales.t()) if blocks else (rows.scales[:, None], weight.scales[None])
    out_TO: Tensor = torch._scaled_mm(
        rows.values, weight.values.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=not blocks
    )
    out_TO = out_TO[:tokens]
    return out_TO if bias is None else out_TO + bias
