"""AITER's weights in tiles and in blocks."""

import torch
from torch import Tensor


def shuffle_weight(x: Tensor, layout: tuple[int, int]) -> Tensor:
    """Tiles of layout[0] rows and 2 * layout[1] columns, rows after columns; the result is marked."""
    tile_rows, tile_columns = layout[0], 2 * layout[1]
    assert x.shape[-2] % tile_rows == 0 and x.shape[-1] % tile_columns == 0
    lane = 16 // x.element_size()
    shape = (x.shape[-2] // tile_rows, tile_rows, x.shape[-1] // tile_columns, tile_columns // lane, lane)
    shuffled = x.reshape(-1, *shape).permute(0, 1, 3, 4, 2, 5).reshape(x.shape)
    shuffled.is_shuffled = True  # type: ignore[attr-defined]
    return shuffled


def plain(shuffled: Tensor) -> Tensor:
    """The inverse of `shuffle_weight`."""
    assert getattr(shuffled, "is_shuffled", False), "the kernels read shuffled weights"
    outputs, inputs = shuffled.shape[-2:]
    lane = 16 // shuffled.element_size()
    tiles = shuffled.view(-1, outputs // 16, inputs // 32, 32 // lane, 16, lane)
    return tiles.permute(0, 1, 4, 2, 3, 5).reshape(shuffled.shape)


def by_block(values: Tensor, scales: Tensor) -> Tensor:
    """The numbers of values [..., N, K] in blocks of 128 x 128, in float32."""
    assert scales.dtype == torch.float32 and scales.is_contiguous()
    rows, columns = (-(-size // 128) for size in values.shape[-2:])
    assert scales.shape == (*values.shape[:-2], rows, columns) and values.shape[-1] % 128 == 0
    scales = scales.repeat_interleave(128, -2)[..., : values.shape[-2], :]
    return values.float() * scales.repeat_interleave(128, -1)
