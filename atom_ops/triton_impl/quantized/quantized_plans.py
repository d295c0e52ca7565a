"""Plans of `linear` with quantized weights: which kernel multiplies how many tokens, and its tiles.

Here are their types and the rules for shapes that were not measured; `known_plans` has all of a device.
"""

import math
from functools import cache

import msgspec

from atom_ops.triton_impl.plans.linear_plans import StreamKPlan
from atom_ops.weights import BlockFP8, ChannelFP8, ChannelINT8, FourBitWords

Packed = BlockFP8 | ChannelFP8 | ChannelINT8 | FourBitWords
"""The types of weight that these kernels read."""


class GemvPlan(msgspec.Struct, frozen=True, tag="quantized-vector"):
    """One token, by `quantized_gemv` or `four_bit_gemv`."""

    rows: int
    """Weight rows of a tile."""
    columns: int
    """Weight columns of one iteration; 0: whole rows."""
    warps: int
    tiles: int = 1
    """Tiles of a program, one after another, by whole rows."""
    tokens: int = 1


class PersistentGemvPlan(msgspec.Struct, frozen=True, tag="quantized-persistent-vector"):
    """One token and FP8 in blocks on Hopper, by `hopper_gemv`."""

    rows: int
    """Weight rows of a tile."""
    columns: int
    """Weight columns that the warps multiply together; they divide the inputs."""
    warps: int
    programs: int
    tokens: int = 1


class MmaPlan(msgspec.Struct, frozen=True, tag="quantized-mma"):
    """Up to 8 tokens and 4-bit weights on NVIDIA GPUs, by `four_bit_mma`."""

    tokens: int
    """Most tokens."""
    warps: int
    """They share the columns of a row."""
    tiles: int
    """Of 16 rows of a program."""


class RingPlan(msgspec.Struct, frozen=True, tag="quantized-ring"):
    """Up to 8 tokens and 4-bit weights without zero points on Hopper, by `four_bit_ring`."""

    tokens: int
    """Most tokens."""
    stages: int
    """Of the ring: with 4 an SM holds one program of 8 warps."""
    warps: int = 8
    """Of one token, 8 or 16 of them multiply."""


class GemmPlan(msgspec.Struct, frozen=True, tag="quantized-tiles"):
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


class WgmmaPlan(msgspec.Struct, frozen=True, tag="quantized-wgmma"):
    """4-bit weights without zero points on Hopper, by `four_bit_split_k`."""

    tokens: int
    """Most tokens."""
    tile: int
    """Tokens of a tile: a power of two from 8 to 128."""
    blocks: int
    """Of 64 weight rows, of a tile: 2 or 3."""
    split_k: int = 1
    phases: int = 1
    """Groups of warps that take turns at a block's steps: 1, or 2 for 2 blocks and up to 64 tokens."""
    chunks: int = 1
    """Of 128 weight columns: of a step, 1 or 2."""


class LibraryPlan(msgspec.Struct, frozen=True, tag="quantized-library"):
    """The vendor's GEMM: of 8-bit floats with 8-bit activations, of other weights after decoding them."""

    tokens: int
    """Most tokens."""


QuantizedPlan = (
    GemvPlan | PersistentGemvPlan | MmaPlan | RingPlan | WgmmaPlan | GemmPlan | StreamKPlan | LibraryPlan
)
QuantizedPlans = tuple[QuantizedPlan, ...]
"""Of one format and weight shape, by rising tokens."""

MANY = 1 << 30
"""Tokens of a plan without a limit."""

Key = tuple[str, int, int]
"""Format, outputs and inputs of a weight."""
PROGRAMS = 132
"""SMs of an H100 or H200."""


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
