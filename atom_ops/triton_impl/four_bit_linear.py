"""GEMM of 4-bit weights (GroupINT4, MXFP4) and plain activations: codes are decoded in registers.

    out[t, o] = sum over groups g of inputs: scale[o, g] * (x[t, even] · low[o, g] + x[t, odd] · high[o, g])

A byte holds an even input's code and the next, odd one's. So the activations are stored by halves, all
even inputs before all odd ones (`rounded_rows`), and the low and the high nibbles are multiplied apart.
Decoded numbers are exact in 16 bits, and sums are scaled in float32. For many tokens the whole weight is
decoded first, by a kernel of its own, for the vendor's GEMM.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.pdl import (
    fits_cache,
    launch_options,
    pdl_begin,
    pdl_launch_dependents,
    pdl_wait,
    prefetch_rows,
)
from atom_ops.triton_impl.quantized_plans import GemmPlan
from atom_ops.triton_impl.rounded_rows import RoundedRows
from atom_ops.weights import MXFP4, GroupINT4

_ADDED_AT_ONCE = 512
_MXFP4_GROUP = 32


@triton.jit
def decode_codes(code, zero, dtype: tl.constexpr, FLOAT: tl.constexpr):
    """4-bit codes (0 to 15, int32 or int16) as numbers: e2m1 with FLOAT, else code - zero; exact."""
    if FLOAT:
        # Sign, exponent and mantissa at their places; the power of two corrects the exponent's bias.
        if dtype == tl.float32:
            bits = ((code & 8).to(tl.int32) << 28) | ((code & 7).to(tl.int32) << 22)
            return bits.to(tl.float32, bitcast=True) * 2.0**126
        elif dtype == tl.bfloat16:
            bits = ((code & 8) << 12) | ((code & 7) << 6)
            return bits.to(tl.int16).to(tl.bfloat16, bitcast=True) * 2.0**126
        else:
            bits = ((code & 8) << 12) | ((code & 7) << 9)
            return bits.to(tl.int16).to(tl.float16, bitcast=True) * 2.0**14
    elif dtype == tl.float32:
        return code.to(tl.float32) - zero.to(tl.float32)
    elif dtype == tl.bfloat16:
        return (code.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (zero + 128).to(tl.bfloat16)
    else:
        return (code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (zero + 1024).to(tl.float16)


@triton.jit
def power_of_two(code):
    """The values of e8m0 codes, float32: 2 ** (code - 127), NaN for 255."""
    wide = code.to(tl.int32)
    bits = (wide << 23) | tl.where((wide == 0) | (wide == 255), 0x400000, 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_scale(scales, at, inside, FLOAT: tl.constexpr):
    if FLOAT:
        return power_of_two(tl.load(scales + at, mask=inside, other=127))
    else:
        return tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "padded"])
def _gemm(
    x, codes, scales, zeros, bias, out, tokens, padded, outputs, inputs, share,
    GROUP: tl.constexpr, FLOAT: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
    PDL: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, splits). COLUMNS divides GROUP; a byte column stands for two inputs."""
    tiles = padded // TOKENS
    split = tl.program_id(1)
    output_R = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    token_T = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    byte_C = tl.arange(0, COLUMNS // 2)
    inside_R, first = output_R < outputs, split * share
    row_R = output_R.to(tl.int64)
    code_RC = codes + row_R[:, None] * (inputs // 2) + byte_C[None, :] + first // 2
    x_CT = x + token_T.to(tl.int64)[None, :] * inputs + byte_C[:, None] + first // 2
    dtype: tl.constexpr = x.dtype.element_ty
    total_RT = tl.zeros((ROWS, TOKENS), tl.float32)
    if FETCH:
        pdl_launch_dependents(PDL)
        start_of_row = (tl.program_id(0) // tiles * ROWS).to(tl.int64) * (inputs // 2)
        prefetch_rows(codes + start_of_row + first // 2, ROWS, inputs // 2, share // 2, PDL)
    zero_R = tl.full((ROWS,), 8, tl.int16)
    pdl_wait(PDL)
    for start in range(0, share, COLUMNS):
        group_R = row_R * (inputs // GROUP) + (first + start) // GROUP
        if EVEN:
            tile_RC = tl.load(code_RC + start // 2).to(tl.int16)
            even_CT, odd_CT = tl.load(x_CT + start // 2), tl.load(x_CT + start // 2 + inputs // 2)
            scale_R = load_scale(scales, group_R, output_R >= 0, FLOAT)
            if zeros is not None:
                zero_R = tl.load(zeros + group_R).to(tl.int16)
        else:
            valid_C = byte_C < (inputs - first - start) // 2
            real_R = inside_R & (first + start < inputs)
            mask_CT = valid_C[:, None] & (token_T >= 0)[None, :]
            tile_RC = tl.load(code_RC + start // 2, mask=inside_R[:, None] & valid_C[None, :], other=0)
            tile_RC = tile_RC.to(tl.int16)
            even_CT = tl.load(x_CT + start // 2, mask=mask_CT, other=0.0)
            odd_CT = tl.load(x_CT + start // 2 + inputs // 2, mask=mask_CT, other=0.0)
            scale_R = load_scale(scales, group_R, real_R, FLOAT)
            if zeros is not None:
                zero_R = tl.load(zeros + group_R, mask=real_R, other=8).to(tl.int16)
        low_RC = decode_codes(tile_RC & 15, zero_R[:, None], dtype, FLOAT)
        high_RC = decode_codes((tile_RC >> 4) & 15, zero_R[:, None], dtype, FLOAT)
        part_RT = tl.dot(low_RC, even_CT, input_precision="ieee")
        part_RT = tl.dot(high_RC, odd_CT, part_RT, input_precision="ieee")
        total_RT += part_RT * scale_R[:, None]
    if not FETCH:
        pdl_launch_dependents(PDL)
    inside_RT = inside_R[:, None] & (token_T < tokens)[None, :]
    place_RT = (split * tokens + token_T).to(tl.int64)[None, :] * outputs + output_R[:, None]
    if HAS_BIAS:
        total_RT += tl.load(bias + output_R, mask=inside_R, other=0.0).to(tl.float32)[:, None]
    tl.store(out + place_RT, total_RT.to(out.dtype.element_ty), mask=inside_RT)


@triton.jit
def _reduce_split_k(
    partials, bias, out, size, outputs,
    SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(partials + split * size + place, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + place % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize(
    codes, scales, zeros, out, outputs, inputs,
    GROUP: tl.constexpr, FLOAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS x COLUMNS bytes; neighbouring codes become neighbouring numbers."""
    pdl_begin(PDL)
    output_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    byte_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_R = output_R.to(tl.int64)
    inside_RC = (output_R < outputs)[:, None] & (byte_C < inputs // 2)[None, :]
    tile_RC = tl.load(codes + row_R[:, None] * (inputs // 2) + byte_C[None, :], mask=inside_RC, other=0)
    at_RC = row_R[:, None] * (inputs // GROUP) + (2 * byte_C // GROUP)[None, :]
    scale_RC = load_scale(scales, at_RC, inside_RC, FLOAT)
    zero_RC = tl.full((ROWS, COLUMNS), 8, tl.int16)
    if zeros is not None:
        zero_RC = tl.load(zeros + at_RC, mask=inside_RC, other=8).to(tl.int16)
    code_RC = tile_RC.to(tl.int16)
    low_RC = decode_codes(code_RC & 15, zero_RC, tl.float32, FLOAT) * scale_RC
    high_RC = decode_codes((code_RC >> 4) & 15, zero_RC, tl.float32, FLOAT) * scale_RC
    pair_RC2 = tl.join(low_RC.to(out.dtype.element_ty), high_RC.to(out.dtype.element_ty))
    input_I = tl.program_id(1) * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS)
    place_RI = row_R[:, None] * inputs + input_I[None, :]
    inside_RI = (output_R < outputs)[:, None] & (input_I < inputs)[None, :]
    tl.store(out + place_RI, tl.reshape(pair_RC2, [ROWS, 2 * COLUMNS]), mask=inside_RI)


def parts_of(weight: GroupINT4 | MXFP4) -> tuple[Tensor, Tensor, Tensor | None, int, bool]:
    """(codes, scales, zeros, group, whether the codes are floats)."""
    if isinstance(weight, MXFP4):
        return weight.blocks, weight.scales, None, _MXFP4_GROUP, True
    return weight.codes, weight.scales, weight.zeros, weight.group, False


def multiply(
    plan: GemmPlan,
    rows: RoundedRows,
    tokens: int,
    weight: GroupINT4 | MXFP4,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[T, O] in `dtype`; `rows` by halves, made with `plan.tile`."""
    (outputs, inputs), x_TI = weight.shape, rows.values
    codes, scales, zeros, group, floats = parts_of(weight)
    columns = min(plan.columns, group & -group)  # the largest power of two that divides the group
    share = triton.cdiv(inputs, plan.split_k * columns) * columns
    split_k = triton.cdiv(inputs, share)
    options = launch_options(x_TI.device)
    out_TO = torch.empty(tokens, outputs, dtype=dtype, device=x_TI.device)
    partials = out_TO
    if split_k > 1:
        partials = torch.empty(split_k, tokens, outputs, dtype=torch.float32, device=x_TI.device)
    even = outputs % plan.rows == 0 and inputs % (split_k * columns) == 0
    _gemm[(triton.cdiv(outputs, plan.rows) * (len(x_TI) // plan.tile), split_k)](
        x_TI, codes, scales, zeros, bias, partials, tokens, len(x_TI), outputs, inputs, share,
        GROUP=group, FLOAT=floats, HAS_BIAS=bias is not None and split_k == 1,
        EVEN=even, SPLIT=split_k > 1, FETCH=even and share % 32 == 0 and fits_cache(codes),
        ROWS=plan.rows, COLUMNS=columns, TOKENS=plan.tile, num_warps=plan.warps,
        num_stages=plan.stages, **options,
    )  # fmt: skip
    if split_k > 1:
        size = tokens * outputs
        _reduce_split_k[(triton.cdiv(size, _ADDED_AT_ONCE),)](
            partials, bias, out_TO, size, outputs,
            SPLIT_K=split_k, HAS_BIAS=bias is not None, BLOCK=_ADDED_AT_ONCE, **options,
        )  # fmt: skip
    return out_TO


def dequantized(weight: GroupINT4 | MXFP4, dtype: torch.dtype) -> Tensor:
    """[O, I] in `dtype`."""
    (outputs, inputs), (codes, scales, zeros, group, floats) = weight.shape, parts_of(weight)
    out_OI = torch.empty(outputs, inputs, dtype=dtype, device=codes.device)
    _dequantize[(triton.cdiv(outputs, 8), triton.cdiv(inputs // 2, 256))](
        codes, scales, zeros, out_OI, outputs, inputs,
        GROUP=group, FLOAT=floats, ROWS=8, COLUMNS=256, num_warps=4, **launch_options(codes.device),
    )  # fmt: skip
    return out_OI
