"""Blocks of all layers as rows of bytes, and back."""

from dataclasses import dataclass

import pytest
import torch

from atom_ops import StateLayer
from atom_ops.ops.attention.kv_cache import FP8, make_kv_layer
from workers.memory.block_rows import BlockRows

CPU = torch.device("cpu")


@dataclass
class WithConstant:
    """Some backends keep a number with their cache."""

    key: torch.Tensor
    one: torch.Tensor


def test_rows_have_the_bytes_of_all_layers() -> None:
    layers = [make_kv_layer(6, 4, 2, 8, dtype, CPU) for dtype in (torch.bfloat16, FP8)]
    for layer in layers:
        layer.kv.view(torch.uint8).copy_(torch.randint(0, 255, layer.kv.view(torch.uint8).shape))
    assert layers[1].scale is not None
    layers[1].scale.copy_(torch.rand(layers[1].scale.shape))
    size = 2 * 4 * 2 * 8 * (2 + 1) + 4 * 2 * 2 * 4
    group = BlockRows(layers, 6, size)
    rows_NS = torch.zeros(2, size, dtype=torch.uint8)
    group.read([4, 1], rows_NS)
    group.write([0, 5], rows_NS)
    for layer in layers:
        assert torch.equal(layer.kv.view(torch.uint8)[[0, 5]], layer.kv.view(torch.uint8)[[4, 1]])
    assert torch.equal(layers[1].scale[[0, 5]], layers[1].scale[[4, 1]])
    assert len(set(group.layouts)) == 3


def test_states_are_rows_too() -> None:
    layer = StateLayer(torch.rand(3, 2, 5), torch.rand(3, 4, 4))
    group = BlockRows([layer], 3, (10 + 16) * 4)
    rows_NS = torch.zeros(1, group.num_bytes, dtype=torch.uint8)
    group.read([2], rows_NS)
    group.write([0], rows_NS)
    assert torch.equal(layer.conv[0], layer.conv[2]) and torch.equal(layer.recurrent[0], layer.recurrent[2])


def test_of_several_places_the_first_one_is_copied() -> None:
    states = torch.rand(6, 5)
    before = states.clone()
    group = BlockRows([states], 2, 20, places=3)
    rows_NS = torch.zeros(1, 20, dtype=torch.uint8)
    group.read([1], rows_NS)
    group.write([0], rows_NS)
    assert torch.equal(states[0], before[3]) and torch.equal(states[1:], before[1:])


def test_numbers_that_are_no_block_are_left_out() -> None:
    group = BlockRows([WithConstant(torch.rand(3, 4), torch.ones(1))], 3, 16)
    assert group.num_bytes == 16


@pytest.mark.parametrize(
    "layer",
    [
        WithConstant(torch.rand(3, 5), torch.ones(1)),
        WithConstant(torch.rand(4, 4), torch.ones(1)),
        WithConstant(torch.rand(4, 3).t(), torch.ones(1)),
    ],
    ids=["other-size", "other-count", "other-order"],
)
def test_other_layouts_are_refused_by_name(layer: WithConstant) -> None:
    with pytest.raises(ValueError, match="the cache of WithConstant"):
        BlockRows([layer], 3, 16)
