"""Activations in the form that a GEMM with a quantized weight reads, made by one kernel.

    e4m3, int8    each token (or each group of inputs of a token) divided by a scale of its own

The same kernel computes the RMSNorm with its residual, or the gated activation, that comes before the
layer: the rows are rounded to the compute dtype first, as the separate kernels round them.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.target import INTERPRETED as _INTERPRETED

Form = Literal["e4m3", "int8"]
MOST_INPUTS = 32768
"""A program holds a row in registers."""
_ROUNDED_AT_ONCE = 4096
"""Inputs of a program, where each group is rounded on its own."""
INTERPRETED = tl.constexpr(_INTERPRETED)
_DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
_BOUNDS = {"e4m3": 448.0, "int8": 127.0}


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """[T, I] with rows that pad T to a whole number of tiles; the padding is not initialised."""

    values: Tensor
    """[padded T, I]."""
    scales: Tensor
    """float32 [padded T], or [I / group, padded T]."""


@triton.jit
def _to_e4m3(wide):
    """Rounded to values of e4m3; the interpreter's own conversion loses carries."""
    bits = wide.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    subnormal = tl.floor(wide * 512 + 0.5) / 512
    return tl.where(tl.abs(wide) < 2.0**-6, subnormal, bits.to(tl.float32, bitcast=True))


@triton.jit
def _store_rounded(
    wide, column, inside, values, scales, row, first_column, padded,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    first = row.to(tl.int64) * SIZE
    if GROUP:
        grouped = tl.reshape(wide, [BLOCK // GROUP, GROUP])
        most = tl.maximum(tl.max(tl.abs(grouped), 1), 1e-12)
        group = first_column // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scales + group * padded + row, most / BOUND, mask=group * GROUP < SIZE)
        rounded = tl.reshape(grouped * (BOUND / most)[:, None], [BLOCK])
    else:
        most = tl.maximum(tl.max(tl.abs(wide), 0), 1e-12)
        tl.store(scales + row, most / BOUND)
        rounded = wide * (BOUND / most)
    rounded = tl.minimum(tl.maximum(rounded, -BOUND), BOUND)
    if FORM == "int8":
        rounded = tl.floor(rounded + 0.5)
    elif INTERPRETED:
        rounded = _to_e4m3(rounded)
    tl.store(values + first + column, rounded.to(values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["padded"])
def _round_rows(
    x, residual, norm_weight, values, scales, total, eps, padded,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, BOUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts of a row): one part, unless nothing depends on more than a group."""
    pdl_launch_dependents(PDL)
    row = tl.program_id(0)
    first_column = tl.program_id(1) * BLOCK
    column = first_column + tl.arange(0, BLOCK)
    inside = column < SIZE
    if norm_weight is not None:
        weight = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    first = row.to(tl.int64) * SIZE
    if GATED:
        gate = tl.load(x + 2 * first + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + 2 * first + SIZE + column, mask=inside, other=0.0).to(tl.float32)
        wide = (gate * tl.sigmoid(gate) * up).to(dtype).to(tl.float32)
    else:
        own = tl.load(x + first + column, mask=inside, other=0.0)
        if residual is not None:
            other = tl.load(residual + first + column, mask=inside, other=0.0)
            own = (own.to(tl.float32) + other.to(tl.float32)).to(dtype)
            tl.store(total + first + column, own, mask=inside)
        wide = own.to(tl.float32)
        if norm_weight is not None:
            scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
            wide = (wide * scale * weight).to(dtype).to(tl.float32)
    _store_rounded(
        wide, column, inside, values, scales, row, first_column, padded, SIZE, BLOCK, FORM, GROUP, BOUND
    )


def round_rows(
    x: Tensor,
    form: Form,
    tile: int,
    *,
    group: int = 0,
    gated: bool = False,
    residual_TD: Tensor | None = None,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[RoundedRows, Tensor]:
    """(the rows of x, or of its norm or activation, in this form; x + residual).

    `tile`: the padded number of rows is a multiple of it. `group`: inputs that share a scale, 0: all of
    a token. `gated`: x is [T, 2F], and the rows are silu(first half) * second half.
    """
    x = x.contiguous()
    tokens = len(x)
    size = x.shape[1] // 2 if gated else x.shape[1]
    padded = triton.cdiv(tokens, tile) * tile
    dtype = _DTYPES[form]
    # The interpreter would warn of sums of random bits.
    make = torch.zeros if _INTERPRETED else torch.empty
    values = make(padded, size, dtype=dtype, device=x.device)
    shape = (triton.cdiv(size, group), padded) if group else (padded,)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    total = x if residual_TD is None else torch.empty_like(x)
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    block = triton.next_power_of_2(size)
    if group and norm_weight_D is None:
        block = min(block, max(_ROUNDED_AT_ONCE, group))
    if tokens:
        _round_rows[(tokens, triton.cdiv(size, block))](
            x, residual_TD, norm_weight_D, values, scales, total, eps, padded,
            SIZE=size, BLOCK=block, GATED=gated, FORM=form, GROUP=group, BOUND=_BOUNDS[form],
            num_warps=min(max(block // 512, 1), 16), **launch_options(x.device),
        )  # fmt: skip
    return RoundedRows(values, scales), total
