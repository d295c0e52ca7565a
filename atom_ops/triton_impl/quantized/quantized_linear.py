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
from typing import Any, TypeGuard

import torch
from torch import Tensor

from atom_ops.triton_impl.hardware.target import INTERPRETED
from atom_ops.triton_impl.quantized.known_plans import plans_of
from atom_ops.triton_impl.quantized.quantized_call import Packed, QuantizedCall
from atom_ops.triton_impl.quantized.quantized_plans import QuantizedPlan
from atom_ops.triton_impl.quantized.rounded_rows import MOST_INPUTS
from atom_ops.weights import MXFP4, BlockFP8, ChannelFP8, FourBitWords, GroupINT4, Weight
from atom_ops.weights.four_bit_words import pack_words

_BLOCK = 128
_FP8_CAPABILITY = (8, 9)


def supports(weight: Weight, x: Tensor) -> TypeGuard[Packed]:
    """Whether a plan can run with these activations, [T, I] or [T, 2I]."""
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
    tokens = len(x)
    plans = plans_of(weight, x.dtype == dtype == torch.bfloat16)
    return next(plan for plan in plans if tokens <= plan.tokens and plan.takes(weight, x.dtype, dtype))


def plan_with_norm(x_TD: Tensor, weight: Weight) -> QuantizedPlan | None:
    """The plan, if the norm before runs in the same kernel as another step of `multiply`."""
    plan = plan_of(x_TD, weight, x_TD.dtype) if supports(weight, x_TD) else None
    return plan if plan is not None and plan.fuses_norm(weight, len(x_TD)) else None  # type: ignore[arg-type]


def plan_with_gate(x_T2F: Tensor, weight: Weight) -> QuantizedPlan | None:
    """The plan, if the activation before runs in the same kernel as another step of `multiply`."""
    plan = plan_of(x_T2F, weight, x_T2F.dtype) if supports(weight, x_T2F) else None
    return plan if plan is not None and plan.fuses_gate(weight, len(x_T2F)) else None  # type: ignore[arg-type]


def multiply(
    plan: QuantizedPlan, x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype, **options: Any
) -> tuple[Tensor, Tensor]:
    """The call by this plan; `options` are further fields of `QuantizedCall`."""
    return plan.multiply(QuantizedCall(x, weight, bias, dtype, **options))
