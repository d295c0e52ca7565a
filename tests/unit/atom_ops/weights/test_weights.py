"""Each type of weight stands for the numbers that its formula gives."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atom_ops import MXFP4, ChannelFP8, ChannelINT8, GroupINT4
from atom_ops.weights import Quantized, dequantized_tiles
from atom_ops.weights.four_bit_words import pack_words
from atom_ops.weights.samples import Format, random_weight

FORMATS: list[Format] = [
    "block_fp8", "channel_fp8", "static_fp8", "channel_int8", "int4_32", "int4_64_zeros", "int4_channel",
    "mxfp4",
]  # fmt: skip


def test_int4_words_are_the_codes_in_order() -> None:
    """As compressed-tensors packs: code j of a word is at bits 4j."""
    words = torch.tensor([[0x76543210, 0xFEDCBA98 - (1 << 32)]], dtype=torch.int32)
    weight = GroupINT4(words.view(torch.uint8), torch.tensor([[0.5, 2.0]]))
    wanted = [(code - 8) * 0.5 for code in range(8)] + [(code - 8) * 2.0 for code in range(8, 16)]
    assert (weight.shape, weight.group) == ((1, 16), 8)
    assert weight.dequantized(torch.float32).tolist() == [wanted]
    zeros = torch.tensor([[0, 15]], dtype=torch.uint8)
    numbers = GroupINT4(weight.codes, weight.scales, zeros).dequantized(torch.float32)
    assert numbers.tolist() == [
        [code * 0.5 for code in range(8)] + [(code - 15) * 2.0 for code in range(8, 16)]
    ]


def test_channels_are_rows() -> None:
    scales = torch.tensor([0.5, -3.0])
    eight = torch.tensor([[-128, 127, 0], [1, 2, 3]], dtype=torch.int8)
    wanted = [[-64.0, 63.5, 0.0], [-3.0, -6.0, -9.0]]
    assert ChannelINT8(eight, scales).dequantized(torch.float32).tolist() == wanted
    floats = torch.tensor([[448.0, -0.5, 0.0], [1, 2, 3]]).to(torch.float8_e4m3fn)
    wanted = [[224.0, -0.25, 0.0], [-3.0, -6.0, -9.0]]
    assert ChannelFP8(floats, scales, torch.tensor(0.1)).dequantized(torch.float32).tolist() == wanted


@pytest.mark.parametrize("format", FORMATS)
def test_experts_rows_and_tiles_are_parts(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = random_weight((3, 300, 128), format, torch.float32, torch.Generator().manual_seed(1))
    assert isinstance(stack, Quantized) and stack.shape == (3, 300, 128)
    numbers = stack.dequantized(torch.float32)
    assert numbers.std().item() == pytest.approx(128**-0.5, rel=0.2)
    one = stack.expert(2)
    assert one.shape == (300, 128) and torch.equal(one.dequantized(torch.float32), numbers[2])
    assert torch.equal(one.rows(128, 300).dequantized(torch.float32), numbers[2, 128:])
    monkeypatch.setattr("atom_ops.weights.types._TILE_NUMBERS", 130 * 128)
    tiles = list(dequantized_tiles(one, torch.float32))
    assert len(tiles) == 3 and torch.equal(torch.cat(tiles), numbers[2])


class WrittenBytes(TorchDispatchMode):
    """Adds up the bytes that operators write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result: Any = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.count += result.nbytes
        return result


@pytest.mark.parametrize("format", ["mxfp4", "int4_32", "int4_64_zeros"])
def test_words_hold_every_number_and_are_packed_in_few_passes(format: Format) -> None:
    """Experts of hundreds of GB are packed while they are loaded."""
    for inputs in (128, 192, 4096):
        weight = random_weight((3, 20, inputs), format, torch.float32, torch.Generator().manual_seed(2))
        assert isinstance(weight, GroupINT4 | MXFP4)
        with WrittenBytes() as written:
            packed = pack_words(weight)
        assert packed is not None
        assert torch.equal(packed.dequantized(torch.float32), weight.dequantized(torch.float32))
    # An index of 8 bytes and a word pair of 4 for each two codes, and three ors of a quarter as many.
    assert written.count < 10 * 3 * 20 * 4096 + (1 << 15)
