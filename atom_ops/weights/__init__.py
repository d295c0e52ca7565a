"""The types of weight that `linear`, the ops fused with it, and `experts` take; a file for each.

Shapes are those of the matrix that a weight stands for: [O, I], outputs and inputs, or [X, O, I] for
a stack of X experts. Quantized weights stay packed in memory; a provider reads them as they are, and
the torch references multiply by their values, a tile of rows at a time.
"""

from atom_ops.weights.affine_ints import AffineInts
from atom_ops.weights.block_fp8 import BlockFP8
from atom_ops.weights.channel_fp8 import ChannelFP8
from atom_ops.weights.channel_int8 import ChannelINT8
from atom_ops.weights.four_bit_words import FourBitWords
from atom_ops.weights.group_int4 import GroupINT4
from atom_ops.weights.mxfp4 import MXFP4
from atom_ops.weights.shuffled import Shuffled, ShuffledFP8
from atom_ops.weights.shuffled_mxfp4 import ShuffledMXFP4
from atom_ops.weights.types import (
    Integers,
    Packed,
    PackedINT4,
    PackedInts,
    PackedOneDNN,
    PackedPanels,
    Quantized,
    Reordered,
    Weight,
    dequantized_tiles,
    tensors_of,
)

__all__ = [
    "MXFP4",
    "AffineInts",
    "BlockFP8",
    "ChannelFP8",
    "ChannelINT8",
    "FourBitWords",
    "GroupINT4",
    "Integers",
    "Packed",
    "PackedINT4",
    "PackedInts",
    "PackedOneDNN",
    "PackedPanels",
    "Quantized",
    "Reordered",
    "Shuffled",
    "ShuffledFP8",
    "ShuffledMXFP4",
    "Weight",
    "dequantized_tiles",
    "tensors_of",
]
