"""Plans of `linear` with quantized weights: which kernel multiplies how many tokens, and its tiles.

A plan knows its kernel: which weights it takes, what it computes besides, and how it is called. Here are also
the rules for shapes that were not measured; `known_plans` has all plans of a device.
"""

import math
from functools import cache
from typing import TypeGuard

import msgspec
import torch
from torch import Tensor

from atom_ops.triton_impl.hardware.target import is_hopper
from atom_ops.triton_impl.plans.linear_plans import StreamKPlan
from atom_ops.triton_impl.quantized.quantized_call import Packed, QuantizedCall
from atom_ops.weights import BlockFP8, ChannelFP8, ChannelINT8, FourBitWords


class QuantizedPlanBase(msgspec.Struct, frozen=True):
    """What every plan answers, unless it says otherwise.

    `multiply` of a plan returns (linear of x, or of its norm or gated activation; x + residual), and imports
    its kernel when it is called, because Gluon for Hopper is not in every Triton.
    """

    def takes(self, weight: Packed, x_dtype: torch.dtype, dtype: torch.dtype) -> bool:
        """Whether the kernel multiplies activations of `x_dtype` by this weight, with a result of `dtype`."""
        return True

    def fuses_norm(self, weight: Packed, tokens: int) -> bool:
        """Whether the norm before runs in the kernel, or in the one that quantizes the activations."""
        return not isinstance(weight, FourBitWords)

    def fuses_gate(self, weight: Packed, tokens: int) -> bool:
        """Whether the gated activation before runs in the kernel, or in the one that quantizes."""
        return not isinstance(weight, FourBitWords)


class GemvPlan(QuantizedPlanBase, frozen=True, tag="quantized-vector"):
    """One token, by `quantized_gemv` or `four_bit_gemv`."""

    rows: int
    """Weight rows of a tile."""
    columns: int
    """Weight columns of one iteration; 0: whole rows, which include the norm before."""
    warps: int
    tiles: int = 1
    """Tiles of a program, one after another, by whole rows."""
    tokens: int = 1

    def fuses_norm(self, weight: Packed, tokens: int) -> bool:
        return self.columns == 0

    def fuses_gate(self, weight: Packed, tokens: int) -> bool:
        return False

    def multiply(self, call: QuantizedCall) -> tuple[Tensor, Tensor]:
        if self.columns != 0 or call.gated:
            x, total = call.separate()
            return self._launch(call, x, None, None, 0.0)[0], total
        return self._launch(call, call.x, call.residual_TD, call.norm_weight_D, call.eps)

    def _launch(
        self, call: QuantizedCall, x_TI: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        x_TI = x_TI.contiguous()
        out_TO = call.new_output()
        total_TI = x_TI if residual is None else torch.empty_like(x_TI)
        rest = call.bias, out_TO, residual, norm, eps, total_TI
        if isinstance(call.weight, FourBitWords):
            from atom_ops.triton_impl.quantized import four_bit_gemv

            four_bit_gemv.multiply(self, x_TI, call.weight, *rest)
        else:
            from atom_ops.triton_impl.quantized import quantized_gemv

            quantized_gemv.multiply(self, x_TI, call.weight, *rest)
        return out_TO, total_TI


class PersistentGemvPlan(QuantizedPlanBase, frozen=True, tag="quantized-persistent-vector"):
    """One token and FP8 in blocks on Hopper, by `hopper_gemv`."""

    rows: int
    """Weight rows of a tile."""
    columns: int
    """Weight columns that the warps multiply together; they divide the inputs."""
    warps: int
    programs: int
    tokens: int = 1

    def fuses_norm(self, weight: Packed, tokens: int) -> bool:
        return False

    def fuses_gate(self, weight: Packed, tokens: int) -> bool:
        return True

    def multiply(self, call: QuantizedCall) -> tuple[Tensor, Tensor]:
        from atom_ops.triton_impl.linear import hopper_gemv

        assert isinstance(call.weight, BlockFP8)
        x, total = (call.x, call.x) if call.gated else call.separate()
        out_TO = call.new_output()
        hopper_gemv.multiply(self, x.contiguous(), call.weight, out_TO, gated=call.gated)
        return (out_TO if call.bias is None else out_TO + call.bias), total


class _FourBitPlan(QuantizedPlanBase, frozen=True):
    """Plans for 4-bit weights alone: activations are not quantized, and come from kernels of their own."""

    def fuses_norm(self, weight: Packed, tokens: int) -> bool:
        return False

    def fuses_gate(self, weight: Packed, tokens: int) -> bool:
        return False


class MmaPlan(_FourBitPlan, frozen=True, tag="quantized-mma"):
    """Up to 8 tokens and 4-bit weights on NVIDIA GPUs, by `four_bit_mma`."""

    tokens: int
    """Most tokens."""
    warps: int
    """They share the columns of a row."""
    tiles: int
    """Tiles of 16 rows that a program multiplies."""

    def takes(self, weight: Packed, x_dtype: torch.dtype, dtype: torch.dtype) -> bool:
        return x_dtype == dtype == torch.bfloat16

    def multiply(self, call: QuantizedCall) -> tuple[Tensor, Tensor]:
        from atom_ops.triton_impl.quantized import four_bit_mma

        assert isinstance(call.weight, FourBitWords)
        x_TI, total = call.separate()
        out_TO = torch.empty(len(x_TI), call.weight.shape[0], dtype=x_TI.dtype, device=x_TI.device)
        four_bit_mma.multiply(self, x_TI, call.weight, call.bias, out_TO)
        return out_TO, total


class RingPlan(_FourBitPlan, frozen=True, tag="quantized-ring"):
    """Up to 8 tokens and 4-bit weights without zero points on Hopper, by `four_bit_ring`.

    One token's norm or activation is computed in the same kernel.
    """

    tokens: int
    """Most tokens."""
    stages: int
    """Stages of the ring: with 4 an SM holds one program of 8 warps."""
    warps: int = 8
    """Warps that multiply, for one token: 8 or 16."""

    def takes(self, weight: Packed, x_dtype: torch.dtype, dtype: torch.dtype) -> bool:
        if not _on_hopper(weight, x_dtype, dtype):
            return False
        from atom_ops.triton_impl.quantized import four_bit_ring

        return four_bit_ring.reads(weight)

    def fuses_norm(self, weight: Packed, tokens: int) -> bool:
        return tokens == 1

    def fuses_gate(self, weight: Packed, tokens: int) -> bool:
        return tokens == 1

    def multiply(self, call: QuantizedCall) -> tuple[Tensor, Tensor]:
        norm = call.norm_weight_D
        if len(call.x) == 1 and (norm is None or norm.dtype == torch.bfloat16):
            return self._launch(call, call.x, call.gated, call.residual_TD, norm)
        x, total = call.separate()
        return self._launch(call, x, False, None, None)[0], total

    def _launch(
        self, call: QuantizedCall, x: Tensor, gated: bool, residual: Tensor | None, norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from atom_ops.triton_impl.quantized import four_bit_ring

        assert isinstance(call.weight, FourBitWords)
        x = x.contiguous()
        out_TO = torch.empty(len(x), call.weight.shape[0], dtype=x.dtype, device=x.device)
        total = x if residual is None else torch.empty_like(x)
        four_bit_ring.multiply(
            self, x, call.weight, call.bias, out_TO, gated=gated, residual_TI=residual,
            norm_weight_I=norm, eps=0.0 if norm is None else call.eps, total_TI=total,
        )  # fmt: skip
        return out_TO, total


class GemmPlan(QuantizedPlanBase, frozen=True, tag="quantized-tiles"):
    """By `eight_bit_linear` or `four_bit_linear`."""

    tokens: int
    """Most tokens."""
    tile: int
    """Tokens of a tile."""
    rows: int
    """Weight rows of a tile."""
    columns: int
    """Weight columns of one iteration."""
    warps: int
    stages: int
    split_k: int = 1

    def multiply(self, call: QuantizedCall) -> tuple[Tensor, Tensor]:
        if isinstance(call.weight, FourBitWords):
            from atom_ops.triton_impl.quantized import four_bit_linear

            x, total = call.separate()
            return four_bit_linear.multiply(self, x, call.weight, call.bias, call.dtype), total
        from atom_ops.triton_impl.quantized import eight_bit_linear

        rows, total = call.quantized(self.tile)
        out_TO = eight_bit_linear.multiply(self, rows, len(call.x), call.weight, call.bias, call.dtype)
        return out_TO, total


class WgmmaPlan(_FourBitPlan, frozen=True, tag="quantized-wgmma"):
    """4-bit weights without zero points on Hopper, by `four_bit_split_k`."""

    tokens: int
    """Most tokens."""
    tile: int
    """Tokens of a tile: a power of two from 8 to 128."""
    blocks: int
    """Blocks of 64 weight rows in a tile: 2 or 3."""
    split_k: int = 1
    phases: int = 1
    """Groups of warps that take turns at a block's steps: 1, or 2 for 2 blocks and up to 64 tokens."""
    chunks: int = 1
    """Chunks of 128 weight columns in a step: 1 or 2."""

    def takes(self, weight: Packed, x_dtype: torch.dtype, dtype: torch.dtype) -> bool:
        if not _on_hopper(weight, x_dtype, dtype):
            return False
        from atom_ops.triton_impl.quantized import four_bit_wgmma

        return four_bit_wgmma.reads(weight)

    def multiply(self, call: QuantizedCall) -> tuple[Tensor, Tensor]:
        from atom_ops.triton_impl.quantized import four_bit_split_k

        assert isinstance(call.weight, FourBitWords)
        x, total = call.separate()
        return four_bit_split_k.multiply(self, x, call.weight, call.bias), total


class FP8StreamKPlan(StreamKPlan, frozen=True, tag="stream-k"):
    """8-bit floats by the stream-K GEMM of `hopper_linear`, which also multiplies 16-bit weights."""

    def takes(self, weight: Packed, x_dtype: torch.dtype, dtype: torch.dtype) -> bool:
        return isinstance(weight, BlockFP8 | ChannelFP8)

    def fuses_norm(self, weight: Packed, tokens: int) -> bool:
        return True

    def fuses_gate(self, weight: Packed, tokens: int) -> bool:
        return True

    def multiply(self, call: QuantizedCall) -> tuple[Tensor, Tensor]:
        from atom_ops.triton_impl.linear import hopper_linear

        weight = call.weight
        assert isinstance(weight, BlockFP8 | ChannelFP8)
        rows, total = call.quantized(self.tile)
        return hopper_linear.multiply_e4m3(self, rows, len(call.x), weight, call.bias, call.dtype), total


class LibraryPlan(QuantizedPlanBase, frozen=True, tag="quantized-library"):
    """The vendor's GEMM: of 8-bit floats with 8-bit activations, of 4-bit weights after decoding them."""

    tokens: int
    """Most tokens."""

    def takes(self, weight: Packed, x_dtype: torch.dtype, dtype: torch.dtype) -> bool:
        from atom_ops.triton_impl.quantized import library

        if isinstance(weight, BlockFP8 | ChannelFP8):
            return dtype == torch.bfloat16 and library.multiplies(weight)
        return isinstance(weight, FourBitWords)

    def multiply(self, call: QuantizedCall) -> tuple[Tensor, Tensor]:
        from atom_ops.triton_impl.quantized import library

        if isinstance(call.weight, FourBitWords):
            x, total = call.separate()
            return library.decoded(x, call.weight, call.bias, call.dtype), total
        assert isinstance(call.weight, BlockFP8 | ChannelFP8)
        group = call.weight.block[1] if isinstance(call.weight, BlockFP8) else 0
        rows, total = call.quantized(library.TILE, group)
        return library.scaled_mm(rows, len(call.x), call.weight, call.bias), total


QuantizedPlan = (
    GemvPlan | PersistentGemvPlan | MmaPlan | RingPlan | WgmmaPlan | GemmPlan | FP8StreamKPlan | LibraryPlan
)
QuantizedPlans = tuple[QuantizedPlan, ...]
"""Plans of one format and weight shape, by rising tokens."""

MANY = 1 << 30
"""Tokens of a plan without a limit."""

Key = tuple[str, int, int]
"""Format, outputs and inputs of a weight."""
PROGRAMS = 132
"""SMs of an H100 or H200."""


def _on_hopper(weight: Packed, x_dtype: torch.dtype, dtype: torch.dtype) -> TypeGuard[FourBitWords]:
    """Whether a 4-bit weight is on Hopper, and activations and result are bfloat16."""
    if not isinstance(weight, FourBitWords) or not x_dtype == dtype == torch.bfloat16:
        return False
    return is_hopper(weight.words.device)


def format_of(weight: Packed) -> str:
    """The format's name in tables of plans."""
    if isinstance(weight, BlockFP8):
        return "fp8-block"
    if isinstance(weight, ChannelFP8):
        return "fp8-channel"
    if isinstance(weight, ChannelINT8):
        return "int8-channel"
    return f"int4-{weight.group}" if weight.group else "mxfp4"


def key_of(weight: Packed) -> Key:
    """What its plans are found by."""
    return format_of(weight), weight.shape[0], weight.shape[1]


@cache
def general_plans(key: Key) -> QuantizedPlans:
    """Plans for shapes that were not measured."""
    format, outputs, inputs = key
    four_bits = format.startswith(("int4", "mxfp4"))
    library = four_bits or (format == "fp8-channel" and outputs % 16 == 0 and inputs % 16 == 0)
    library |= format == "fp8-block" and outputs % 16 == 0 and inputs % 512 == 0
    few = [_filled(outputs, inputs, tokens, four_bits) for tokens in (16, 32, 64)]
    whole = GemvPlan(4, 0, 8, 2) if inputs <= _WHOLE_ROWS else GemvPlan(2, 4096, 8)
    vector = GemvPlan(4, 4096, 4) if four_bits else whole
    many = GemmPlan(MANY, 64, 128, 128, 4, 3) if four_bits else GemmPlan(MANY, 128, 128, 128, 8, 3)
    if not library:
        return (vector, *few, GemmPlan(256, 64, 64, 128, 4, 4), many)
    if four_bits:
        hopper = [_shared(outputs, inputs, tokens) for tokens in (32, 64, 128, 256)]
        elsewhere = (*few[1:], GemmPlan(128, 64, 128, 128, 4, 3))
        middle = [plan for pair in zip(hopper, elsewhere, strict=False) for plan in pair]
        return (vector, few[0], *middle, hopper[-1], LibraryPlan(MANY), many)
    return (vector, *few, LibraryPlan(MANY), many)


_WHOLE_ROWS = 8192


def _shared(outputs: int, inputs: int, tokens: int) -> WgmmaPlan:
    """The plan for Hopper whose programs multiply the fewest blocks of 64 rows and 1024 columns."""
    tile = min(tokens, 128)
    best = math.inf, 0, 0
    for blocks in (3, 2):
        tiles = -(-outputs // (64 * blocks)) * (tokens // tile)
        split_k = max(1, min(PROGRAMS // tiles, inputs // 1024))
        rounds = -(-tiles * split_k // PROGRAMS)
        best = min(best, (rounds * blocks / split_k, blocks, split_k))
    _, blocks, split_k = best
    return WgmmaPlan(tokens, tile, blocks, split_k, 2 if blocks == 2 and tile <= 64 else 1)


def _filled(outputs: int, inputs: int, tokens: int, four_bits: bool) -> GemmPlan:
    """A plan of 64 rows for few tokens, with as many splits as fill the GPU."""
    tiles = -(-outputs // 64)
    splits = [splits for splits in (1, 2, 4) if inputs >= 512 * splits]
    split_k = next((splits for splits in splits if tiles * splits >= PROGRAMS), splits[-1] if splits else 1)
    stages = 3 if four_bits else 6 if split_k > 1 else 4
    columns = 256 if four_bits and tokens <= 16 else 128
    return GemmPlan(tokens, tokens, 64, columns, 4, stages, split_k)
