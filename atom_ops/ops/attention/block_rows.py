"""Blocks of a KV cache as rows: what all layers keep of a block, one layer after the other.

N blocks, U units of a row, L tensors. Tensor l is [blocks, W_l], and the W_l add up to U.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.tolerances import EXACT


@dataclass(frozen=True)
class BlockTensors:
    """Contiguous tensors of one integer type, whose first dimension is the block."""

    tensors: tuple[Tensor, ...]

    @cached_property
    def places_L3(self) -> Tensor:
        """int64, on the device: address and width of each tensor, and where it begins in a row."""
        widths = [tensor.shape[1] for tensor in self.tensors]
        starts = accumulate(widths, initial=0)
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        places = list(zip(addresses, widths, starts, strict=False))
        return torch.tensor(places, dtype=torch.int64, device=self.tensors[0].device)


def _case(label: str, unit: torch.dtype, widths: tuple[int, ...], blocks: tuple[int, ...]) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[BlockTensors, Tensor, Tensor]:
        def filled(*shape: int) -> Tensor:
            return torch.randint(0, 200, shape, generator=generator).to(unit)

        tensors = BlockTensors(tuple(filled(50, width) for width in widths))
        return tensors, torch.tensor(blocks, dtype=torch.int64), filled(len(blocks), sum(widths))

    return Case(label, make)


_CASES = [
    _case("two-layers", torch.int64, (64, 64), (7, 0, 49)),
    _case("many-blocks", torch.int64, (2050, 32, 2050, 32, 6), tuple(range(40, 2, -1))),
    _case("odd-widths", torch.int64, (5, 3), (1, 2)),
    _case("bytes", torch.uint8, (33, 14), (4,)),
]


@op(_CASES, EXACT)
def gather_block_rows(blocks: BlockTensors, blocks_N: Tensor, rows_NU: Tensor) -> None:
    """Copy blocks (int64) of all tensors to contiguous rows of the same type."""
    start = 0
    for tensor in blocks.tensors:
        width = tensor.shape[1]
        rows_NU.narrow(1, start, width).copy_(tensor.index_select(0, blocks_N))
        start += width


@op(_CASES, EXACT)
def scatter_block_rows(blocks: BlockTensors, blocks_N: Tensor, rows_NU: Tensor) -> None:
    """Copy contiguous rows to blocks (int64, each once) of all tensors of the same type."""
    start = 0
    for tensor in blocks.tensors:
        width = tensor.shape[1]
        tensor.index_copy_(0, blocks_N, rows_NU.narrow(1, start, width))
        start += width
