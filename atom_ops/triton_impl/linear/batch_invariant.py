"""Batch-invariant `linear` in Triton: a token's bits depend on the token and the weight alone.

    out[t, o] = ((x[t, 0:16] · w[o, 0:16] + x[t, 16:32] · w[o, 16:32]) + …) + bias[o]

One kernel sums every element in this order in float32, without split-K. On Hopper the tile size
does not change the order: all tiles below give the same bits (tests/gpu/test_batch_invariance.py),
so each GEMM uses the fastest one. Other devices use one tile for all shapes.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from atom_ops.ops.linear.linear import BATCH_INVARIANT, linear
from atom_ops.triton_impl.hardware.persistent import num_sms
from atom_ops.triton_impl.hardware.target import INTERPRETED, NEEDS, is_hopper, runs_on


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile sizes and compile options of a GEMM."""

    tokens: int
    outputs: int
    inputs: int
    """Inputs of one iteration."""
    warps: int
    stages: int
    cost: float = 1.0
    """Relative time of one wave: one tile on every SM."""


# Half precision, measured on an H200.
_HOPPER = (
    Tile(64, 16, 256, 4, 4, cost=0.21),
    Tile(64, 32, 256, 4, 4, cost=0.24),
    Tile(64, 64, 128, 4, 6, cost=0.33),
    Tile(64, 128, 128, 4, 4, cost=0.42),
    Tile(128, 128, 64, 4, 5, cost=0.56),
    Tile(128, 256, 64, 8, 3, cost=1.0),
)
_ANYWHERE = Tile(64, 64, 64, 4, 2)
_FLOAT32 = Tile(64, 64, 32, 4, 2)
_INTERPRETED = Tile(64, 256, 128, 4, 2)
_GROUP = 16
_PERSISTENT_WAVES = 3
_PERSISTENT_TOKENS = 128
_SHARED_BYTES = 227 << 10
"""Shared memory of a program on Hopper."""


@triton.jit
def _place(number, tokens, outputs, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, GROUP: tl.constexpr):
    """First token and first output of a tile; tiles are grouped so that neighbours share L2 lines."""
    tiles_t = tl.cdiv(tokens, BLOCK_T)
    tiles_o = tl.cdiv(outputs, BLOCK_O)
    first = number // (GROUP * tiles_o) * GROUP
    height = tl.minimum(tiles_t - first, GROUP)
    within = number % (GROUP * tiles_o)
    return (first + within % height) * BLOCK_T, (within // height) * BLOCK_O


@triton.jit(do_not_specialize=["tokens"])
def _gemm(
    x, weight, bias, out, tokens, outputs, inputs,
    HAS_BIAS: tl.constexpr, DESCRIBED: tl.constexpr, X_DESCRIBED: tl.constexpr,
    OUT_DESCRIBED: tl.constexpr, PERSISTENT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """DESCRIBED: `weight` is a tensor descriptor, else a pointer; the same holds for `x` and `out`."""
    tiles = tl.cdiv(tokens, BLOCK_T) * tl.cdiv(outputs, BLOCK_O)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=PERSISTENT):
        first_t, first_o = _place(number, tokens, outputs, BLOCK_T, BLOCK_O, GROUP)
        token_T = first_t + tl.arange(0, BLOCK_T)
        output_O = first_o + tl.arange(0, BLOCK_O)
        total_TO = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
        for start in range(0, inputs, BLOCK_I):
            input_I = start + tl.arange(0, BLOCK_I)
            if X_DESCRIBED:
                x_TI = x.load([first_t, start])
            else:
                x_TI = tl.load(
                    x + token_T.to(tl.int64)[:, None] * inputs + input_I[None, :],
                    mask=(token_T < tokens)[:, None] & (input_I < inputs)[None, :],
                    other=0.0,
                )
            if DESCRIBED:
                weight_OI = weight.load([first_o, start])
            else:
                weight_OI = tl.load(
                    weight + output_O.to(tl.int64)[:, None] * inputs + input_I[None, :],
                    mask=(output_O < outputs)[:, None] & (input_I < inputs)[None, :],
                    other=0.0,
                )
            total_TO = tl.dot(x_TI, tl.trans(weight_OI), total_TO, input_precision="ieee")
        if HAS_BIAS:
            bias_O = tl.load(bias + output_O, mask=output_O < outputs, other=0.0)
            total_TO += bias_O.to(tl.float32)[None, :]
        if OUT_DESCRIBED:
            out.store([first_t, first_o], total_TO.to(out.dtype))
        else:
            tl.store(
                out + token_T.to(tl.int64)[:, None] * outputs + output_O[None, :],
                total_TO.to(out.dtype.element_ty),
                mask=(token_T < tokens)[:, None] & (output_O < outputs)[None, :],
            )


def multiply(
    tile: Tile,
    x_TI: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    described: bool,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear` with this tile; at least one token.

    `described`: loads and stores use tensor descriptors (TMA). TMA is slow with rows out of bounds,
    so x is loaded without it if there are fewer tokens than in a tile. A result of a wider dtype is
    stored without it, because the tile would not fit in shared memory.
    """
    tokens, inputs = x_TI.shape
    outputs = len(weight)
    out_TO = x_TI.new_empty(tokens, outputs, dtype=out_dtype)
    tiles = triton.cdiv(tokens, tile.tokens) * triton.cdiv(outputs, tile.outputs)
    # With many waves a persistent kernel, one program on each SM, is faster.
    sms = num_sms(x_TI.device)
    persistent = described and tile.tokens >= _PERSISTENT_TOKENS and tiles > _PERSISTENT_WAVES * sms
    x_described = described and tokens >= tile.tokens
    out_described = described and out_TO.dtype == x_TI.dtype
    x, w, out = x_TI, weight, out_TO
    if x_described:
        x = TensorDescriptor.from_tensor(x_TI, [tile.tokens, tile.inputs])
    if described:
        w = TensorDescriptor.from_tensor(weight, [tile.outputs, tile.inputs])
    if out_described:
        out = TensorDescriptor.from_tensor(out_TO, [tile.tokens, tile.outputs])
    _gemm[(sms if persistent else tiles,)](
        x, w, bias, out, tokens, outputs, inputs,
        HAS_BIAS=bias is not None, DESCRIBED=described, X_DESCRIBED=x_described,
        OUT_DESCRIBED=out_described, PERSISTENT=persistent,
        BLOCK_T=tile.tokens, BLOCK_O=tile.outputs, BLOCK_I=tile.inputs, GROUP=_GROUP,
        num_warps=tile.warps, num_stages=_stages(tile, x_TI, out_TO),
    )  # fmt: skip
    return out_TO


def _stages(tile: Tile, x_TI: Tensor, out_TO: Tensor) -> int:
    """Stages that fit: a result of a wider dtype also passes through shared memory."""
    if out_TO.dtype == x_TI.dtype:
        return tile.stages
    stage = (tile.tokens + tile.outputs) * tile.inputs * x_TI.element_size()
    room = _SHARED_BYTES - tile.tokens * tile.outputs * out_TO.element_size()
    return min(tile.stages, room // stage)


@cache
def _fastest_tile(tokens: int, outputs: int, sms: int) -> Tile:
    """The fastest tile on Hopper, by the number of waves."""

    def cost(tile: Tile) -> float:
        tiles = triton.cdiv(tokens, tile.tokens) * triton.cdiv(outputs, tile.outputs)
        return triton.cdiv(tiles, sms) * tile.cost

    return min(_HOPPER, key=cost)


def _tile(x_TI: Tensor, weight: Tensor, hopper: bool) -> Tile:
    if INTERPRETED:
        return _INTERPRETED
    if weight.dtype == torch.float32:
        return _FLOAT32
    return _fastest_tile(len(x_TI), len(weight), num_sms(weight.device)) if hopper else _ANYWHERE


def _describable(*tensors: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes, as tensor descriptors need."""
    return all(
        tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0
        for tensor in tensors
    )


@linear.provider(
    BATCH_INVARIANT,
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_TI, weight, bias=None, out_dtype=None: isinstance(weight, Tensor),
)
def _linear(
    x_TI: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    if not len(x_TI):
        return x_TI.new_empty(0, len(weight), dtype=out_dtype)
    x_TI, weight = x_TI.contiguous(), weight.contiguous()
    hopper = is_hopper(weight.device)
    described = hopper and weight.dtype.itemsize == 2 and len(weight) % 8 == 0 and _describable(x_TI, weight)
    return multiply(_tile(x_TI, weight, hopper), x_TI, weight, bias, described, out_dtype)
